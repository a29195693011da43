"""The page as a small GIF: a browser draws each event, and Pillow joins the pictures."""

import io
import math
import tempfile
from pathlib import Path

from PIL import Image

from extra.watch import chromium

WIDTH, HEIGHT = 900, 700  # so narrow that the code is below the memory
FRAMES = 60  # at most this many events
COLOURS = 40
# An animation shows the memory and the code. The rest of the page is hidden.
TRIM = """
const spare = "header label, nav, #scrub, #legend, #time, footer";
document.querySelectorAll(spare).forEach((element) => { element.hidden = true; });
document.querySelector("h1").textContent = `${watch.rec.title}: a recorded training step, ${watch.rec.ranks} ranks`;
document.body.style.padding = "10px 14px";
document.getElementById("codes").style.marginTop = "10px";
document.getElementById("caption").style.cssText = "min-height: 3.1em; margin-bottom: 4px";
const source = document.querySelector(".source"), below = source.getBoundingClientRect().top;
source.style.cssText = `min-height: 0; height: ${innerHeight - below - 14}px`;
watch.frame = () => {};
return watch.rec.events.map((e) => [e[1], e[2]]);
"""


def draw(page: str, file: Path) -> None:
    """Write `page` (HTML), event by event, to the GIF `file`."""
    pictures = screenshots(page)
    durations = [milliseconds for _, milliseconds in pictures]
    durations[-1] = 3000
    frames = [Image.open(io.BytesIO(png)).convert("RGB") for png, _ in pictures]
    palette = common_palette(frames)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True, disposal=1)


def screenshots(page: str) -> list[tuple[bytes, int]]:
    """[(PNG, milliseconds to show it)]: each event of the page, and two of a collective that moves."""
    found = []
    with tempfile.TemporaryDirectory() as folder, chromium.started(WIDTH, HEIGHT) as browser:
        html = Path(folder) / "page.html"
        html.write_text(page, encoding="utf-8")
        browser.get(html.as_uri())
        for event in events_to_draw(browser.execute_script(TRIM)):
            flying = browser.execute_script("watch.go(arguments[0]); return watch.picture.fly(0.3);", event)
            for part in (0.3, 0.7) if flying else (0.5,):
                browser.execute_script("watch.picture.fly(arguments[0]);", part)
                found.append((browser.get_screenshot_as_png(), 300 if flying else 600))
    return found


def events_to_draw(events: list[tuple[int, str]]) -> list[int]:
    """The indexes of the events of rank 0 (its code is shown) that send, free or update, and of the last event.

    `events` are pairs (rank, what). A long step is thinned out. The picture shows the computations in between.
    """
    wanted = [k for k, (rank, what) in enumerate(events) if rank == 0 and what not in ("end", "compute")]
    return [*wanted[: -1 : math.ceil(len(wanted) / FRAMES)], len(events) - 1]


def common_palette(frames: list):
    """One palette for all frames, made from frames of the whole step, so that no frame loses colours."""
    some = frames[:: max(1, len(frames) // 8)]
    montage = Image.new("RGB", (WIDTH, some[0].height * len(some)))
    for place, frame in enumerate(some):
        montage.paste(frame, (0, place * frame.height))
    return montage.quantize(COLOURS, kmeans=1)
