"""The figures: drawn from the committed measurements, with units on their axes, and shown in the docs."""

import re

import matplotlib
import matplotlib.pyplot as plt
import pytest

from zerolab.measure import figures
from zerolab.measure.ledger import PARTS
from zerolab.run.engines import ENGINES
from zerolab.run.ranks import ROOT

# How many axes of each figure have a label. The others show categories (engines, lanes, options) or share a label.
LABELLED_AXES = {
    "stages": 5,
    "memory": 1,
    "live": 5,
    "lanes": 4,
    "losses": 3,
    "step-time": 2,
    "sweeps": 2,
    "scaling": 2,
}
PINNED = f"matplotlib=={matplotlib.__version__}\n" in (ROOT / "requirements.txt").read_text()


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def drawn(name: str):
    """(what was measured, the figure)"""
    measured = figures.load([str(figures.RESULTS / file) for file in figures.FIGURES[name].files])
    return measured, figures.FIGURES[name].draw(*measured)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_axes_have_units_the_docs_show_the_figure_and_the_committed_one_is_up_to_date(name, tmp_path):
    """After a change on purpose run ./launch.sh docs, and look at the new figures."""
    _, figure = drawn(name)
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
    assert all(re.search(r"\b(MB|GB|bytes|ms|nats|ranks?|step|fraction)\b", label) for label in labels), labels
    assert len(labels) == LABELLED_AXES[name]
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert f"(../results/figures/{name}.png)" in pages
    if PINNED:  # another version draws other pixels
        figures.save(figure, tmp_path / "new.png")
        new, old = plt.imread(tmp_path / "new.png"), plt.imread(figures.RESULTS / "figures" / f"{name}.png")
        assert new.shape == old.shape
        different = (abs(new - old).max(axis=2) > 0.05).mean()  # a processor's rounding is no change
        assert different < 5e-5, f"{name}.png: {different:.2%} of its pixels differ from results/figures"


def test_the_step_time_figure_draws_the_whole_step():
    """The bars of a column are as long as its ranks' steps: no part is left out."""
    results, figure = drawn("step-time")
    for axes, report in zip(figure.axes, results, strict=True):
        runs = [run for name, run in report["runs"].items() if name != "single"]  # one process waits for nobody
        expected = sum(rank["step_ms"] for run in runs for rank in run["step_time"]["ranks"])
        assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(expected, rel=1e-3)


def test_parts_have_different_colours_and_engines_different_marks():
    """Parts of one figure are distinguished by their colour, engines by a mark and a line."""
    assert len({figures.COLOURS[part] for part in PARTS}) == len(PARTS)
    assert len({figures.COLOURS[lane] for lane in figures.LANES}) == len(figures.LANES)
    assert {*figures.TIMES} <= {*figures.COLOURS}
    assert len({(engine.mark, engine.line) for engine in ENGINES.values()}) == len(ENGINES)


def test_figures_can_be_read_on_a_dark_page():
    """No figure is transparent."""
    for file in (figures.RESULTS / "figures").iterdir():
        pixels = plt.imread(file)
        assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1, file.name
        assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1], :3] == 1).all(), file.name
