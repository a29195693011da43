"""Shows the page of a recorded step in a notebook: docs/watch.html, or one that `./launch.sh watch` has written."""

import html
import re
from dataclasses import dataclass
from pathlib import Path

READY = Path(__file__).resolve().parents[2] / "docs" / "watch.html"
HEIGHT, HEIGHT_OF_TWO = 950, 1700  # pixels that the page needs on a wide screen


@dataclass
class Frame:
    """A page inside a notebook: Jupyter shows what `_repr_html_` returns."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self.height}px; border: 0"
        return f'<iframe title="a recorded step" style="{style}" srcdoc="{html.escape(self.page)}"></iframe>'


def show(page: Path | str = READY, run: str = "", event: int = 1, beside: str = "") -> Frame:
    """The page for a notebook's cell, opened at `event` (from 1 on) of `run`, with another recording `beside` it."""
    opens = f'<body data-run="{html.escape(run)}" data-event="{event}" data-beside="{html.escape(beside)}">'
    text, bodies = re.subn(r"<body data-run=[^>]*>", lambda _: opens, Path(page).read_text(encoding="utf-8"), count=1)
    if not bodies:
        raise ValueError(f"{str(page)!r} has no recordings: use a page that ./launch.sh watch has written")
    return Frame(text, HEIGHT_OF_TWO if beside else HEIGHT)
