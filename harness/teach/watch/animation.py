"""The page as a small GIF: a browser draws event after event, and Pillow puts the pictures together."""

import base64
import io
import tempfile
from pathlib import Path

from harness.teach.watch import browser

WIDTH, HEIGHT = 900, 765
FRAMES = 150  # at most; a longer recording is thinned out
SMALL = 1_000_000  # bytes
# What is not for an animation is hidden; the rest stands as in the page.
TRIM = """
const spare = "header label, nav, #scrub, #legend, #parts, #bars, footer";
document.querySelectorAll(spare).forEach((element) => { element.hidden = true; });
document.querySelector("h1").textContent = `${watch.rec.title}: a recorded training step, ${watch.rec.ranks} ranks`;
document.body.style.padding = "10px 14px";
document.getElementById("said").style.minHeight = "3.1em";
watch.frame = () => {};
return watch.rec.events.map((e) => e[2]);
"""


def check() -> None:
    """Raises ValueError where there is nothing to draw with."""
    if browser.found() is None:
        raise ValueError(f"--gif needs a browser: {browser.WITHOUT}")
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ValueError("--gif needs Pillow, which comes with matplotlib: pip install pillow") from None


def draw(page: str, file: Path, dark: bool = False) -> None:
    """Write `page` (HTML), event by event, to the GIF `file`. Raises RuntimeError if it gets larger than a megabyte."""
    from PIL import Image

    frames, durations = [], []
    with tempfile.TemporaryDirectory() as folder, browser.Browser(WIDTH, HEIGHT) as chromium:
        chromium.theme(dark)
        html = Path(folder) / "page.html"
        html.write_text(page, encoding="utf-8")
        chromium.open(html)
        kinds = chromium.run(TRIM)
        wanted = [k for k, kind in enumerate(kinds) if kind != "end" or k + 1 == len(kinds)][
            :: -(-len(kinds) // FRAMES)
        ]
        for k in wanted:
            flying = chromium.run("watch.go(arguments[0]); return watch.picture.fly(0.3);", k)
            for part in (0.3, 0.7) if flying else (0.5,):
                chromium.run("watch.picture.fly(arguments[0]);", part)
                frames.append(Image.open(io.BytesIO(base64.b64decode(chromium.screenshot()))).convert("RGB"))
                durations.append(300 if flying else 600)
    # One palette for all, from frames of the whole step: colours that a frame lacks must not be lost for the others.
    some = frames[:: max(1, len(frames) // 8)]
    montage = Image.new("RGB", (WIDTH, some[0].height * len(some)))
    for place, frame in enumerate(some):
        montage.paste(frame, (0, place * frame.height))
    palette = montage.quantize(160, kmeans=1)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations[-1] = 3000
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True, disposal=1)
    if file.stat().st_size > SMALL:
        raise RuntimeError(
            f"{file} has {file.stat().st_size / 1e6:.2f} MB, more than 1: record fewer layers (--preset)"
        )
