"""What is generated in this folder's README.md: its tables and sentences, from results/plan-*.json.

    python -m extra.planner.page             writes them, and draws the page's two pictures
    python -m extra.planner.page --check     writes nothing and draws nothing: fails if something written is stale

How a block is marked in the page: zerolab/teach/docs.py.
"""

import json
import sys
import textwrap
from pathlib import Path

from extra.planner import pictures, validate
from zerolab.measure import figures, tables
from zerolab.run.command_line import Parser, one_line
from zerolab.teach import docs
from zerolab.teach.articles import report
from zerolab.teach.articles.claim import ARTICLES

PAGE = Path(__file__).with_name("README.md")
RESULTS = docs.ROOT / "results"
PICTURES = {"plan-scale": pictures.scale, "plan-validation": pictures.validation}  # each of results/NAME.json


def result(name: str):
    """What `./launch.sh plan --scale` or `--validate`, or the claims, have written to results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def plan_validation() -> str:
    """A row per published measurement."""
    return tables.markdown(validate.table(result("plan-validation")["rows"]))


def plan_groups() -> str:
    """A row per source and size."""
    return tables.markdown(validate.table_of_groups(result("plan-validation")["summary"]["groups"]))


def plan_summary() -> str:
    """The errors and what was fitted, in sentences."""
    text = validate.in_sentences(result("plan-validation"))
    return "\n".join(textwrap.fill(f"- {line}", 120, subsequent_indent="  ") for line in text)


def plan_missed() -> str:
    """The rows that miss by more than is hoped for."""
    return "; ".join(result("plan-validation")["summary"]["missed"]) or "none"


def plan_articles() -> str:
    """The articles' claims about time."""
    rows, parts = result("plan-articles"), []
    for title in ARTICLES.values():
        parts += [f"**{title}**", report.table_of_article(title, rows)]
    return "\n\n".join(parts)


BLOCKS = {
    "plan-validation": plan_validation,
    "plan-groups": plan_groups,
    "plan-summary": plan_summary,
    "plan-missed": plan_missed,
    "plan-articles": plan_articles,
}


def draw(name: str, folder: Path = RESULTS / "figures") -> Path:
    """Draw one of `PICTURES` into a folder; returns where it is."""
    path = folder / f"{name}.png"
    figures.save(PICTURES[name](result(name)), path)
    return path


@one_line(ValueError, OSError)
def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if --check finds something stale; an error ends it with 2."""
    parser = Parser("", description="Writes the generated parts and the pictures of extra/planner/README.md.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; the exit status is 1 if the page is out of date"
    )
    parser.usage = "python -m extra.planner.page [--check]"
    options = parser.parse_args(argv)
    stale = docs.update([PAGE], BLOCKS, "python -m extra.planner.page", options.check)
    for name in PICTURES if not options.check else ():
        print(f"written: {draw(name)}")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
