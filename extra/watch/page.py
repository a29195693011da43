"""The page: template, style, scripts and recordings in one HTML file, which needs no server, network or library."""

import html
import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("state.js", "source.js", "words.js", "picture.js", "lanes.js", "code.js", "player.js")


def build(recordings: list[dict], run: str = "", event: int = 1, beside: str = "") -> str:
    """The page's text, with `recordings` (see merge_ranks.py) to choose from. It opens `run` at `event`, from 1 on.

    `beside` is the name of the recording to show below it. The chapters' sources are in the page once: a recording in
    the page has their indexes.
    """
    sources: list[str] = []
    packed = []
    for recording in recordings:
        chapters = {}
        for number, source in recording["chapters"].items():
            if source not in sources:
                sources.append(source)
            chapters[number] = sources.index(source)
        packed.append({**recording, "chapters": chapters})
    parts = {
        "run": html.escape(run),
        "event": str(event),
        "beside": html.escape(beside),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "recordings": _json_of(packed),
        "sources": _json_of(sources),
    }
    text = (HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"/\*(" + "|".join(parts) + r")\*/", lambda found: parts[found[1]], text)


def _json_of(values: list) -> str:
    lines = ",\n".join(json.dumps(value, separators=(",", ":"), ensure_ascii=False) for value in values)
    return f"[{lines}]".replace("</", "<\\/")  # nothing in it may end the script


def recordings_of(file: Path | str) -> list[dict]:
    """The recordings in a page. Raises ValueError for a file that has none."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"cannot read {str(file)!r}: {error.strerror}") from error
    found = []
    for name in ("recordings", "sources"):
        inside = re.search(f'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
        if inside is None:
            raise ValueError(f"{str(file)!r} has no recordings: ./launch.sh watch writes them")
        found.append(json.loads(inside[1]))
    recordings, sources = found
    for recording in recordings:
        recording["chapters"] = {number: sources[index] for number, index in recording["chapters"].items()}
    return recordings
