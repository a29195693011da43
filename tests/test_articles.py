"""Every claim of the articles is measured again: verdict and numbers must equal results/articles.json."""

import json
import re

import pytest

from zerolab.run.ranks import ROOT
from zerolab.teach import articles, articles_options
from zerolab.teach.articles import on_memory, on_traffic, printed, report
from zerolab.teach.articles.__main__ import chosen, main
from zerolab.teach.articles.claim import (
    ARTICLES,
    DEPENDS,
    DOES_NOT_HOLD,
    FRAMEWORKS,
    HOLDS,
    SCALING,
    Claim,
    Outcome,
    claim,
    depends_on,
    holds_if,
)

ROWS = json.loads((ROOT / "results" / "articles.json").read_text())["claims"]
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
SLOW = {  # dry runs of large models
    "ddp_needs_112_gb",
    "stages_need_63_38_and_14_gb",
    "zero3_needs_8_times_less",
    "fsdp_runs_7b_on_14_gb",
    "zero3_needs_16_gb",
    "zero3_fits_an_a100_with_40_gb",
    "activations_of_70b_are_30_to_50_gb",
    "activations_of_7b_are_4_gb",
}


def cases() -> list:
    """The claims; the slow ones run only with `-m thorough`."""
    found = []
    for one in articles.CLAIMS:
        marks = [pytest.mark.thorough] if one.name in SLOW else []
        found.append(pytest.param(one, marks=marks, id=one.name))
    return found


def numbers(found: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(found)]


def assert_as_recorded(claim: Claim, rows: list[dict], tolerance: float = 0.01) -> None:
    (recorded,) = [row for row in rows if row["name"] == claim.name]
    outcome = claim.check()
    assert (outcome.verdict, outcome.why) == (recorded["verdict"], recorded["why"]), outcome.found
    assert NUMBER.sub("#", outcome.found) == NUMBER.sub("#", recorded["found"])
    assert numbers(outcome.found) == pytest.approx(numbers(recorded["found"]), rel=tolerance), outcome.found


@pytest.mark.parametrize("claim", cases())
def test_a_claim_has_its_recorded_verdict_and_numbers(claim):
    assert_as_recorded(claim, ROWS)


def test_all_claims_are_listed_and_recorded():
    for module in (on_memory, on_traffic, printed):
        assert [one for one in vars(module).values() if isinstance(one, Claim)] == module.CLAIMS
    recorded = [(row["name"], row["claim"]) for row in ROWS]
    assert recorded == [(one.name, one.text) for one in articles.CLAIMS]
    assert len({name for name, _ in recorded}) == len(recorded)
    assert all(row["why"] for row in ROWS if row["verdict"] != HOLDS)
    assert {name for name, _ in recorded} >= SLOW


def test_the_printed_zero3_does_not_free():
    (row,) = [row for row in ROWS if row["name"] == "printed_zero3_frees"]
    assert row["verdict"] == DOES_NOT_HOLD and "7 weights are alive" in row["found"]


@claim((FRAMEWORKS, "a section"), (SCALING, "another section"))
def made_up():
    """A claim
    of two lines.

    A remark.
    """
    return holds_if(1 > 2, "1", why="1 is less | than 2")


@claim((SCALING, "another section"))
def raises():
    """A claim that cannot be run."""
    raise TypeError("no such thing")


def test_a_claim_is_the_first_paragraph_of_its_docstring():
    assert (made_up.name, made_up.text) == ("made_up", "A claim of two lines.")


def test_a_condition_is_named_only_if_it_decides():
    assert holds_if(True, "1", why="unused") == Outcome(HOLDS, "1")
    assert depends_on("if N > 1", True, False, "1") == Outcome(DEPENDS, "1", "if N > 1")
    assert depends_on("if N > 1", True, True, "1") == Outcome(HOLDS, "1")
    assert depends_on("if N > 1", False, True, "1").verdict == DOES_NOT_HOLD


def test_the_command_writes_its_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["--article", "frameworks", "--only", "Adam's states", "not in any", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["claims"] == [
        row for row in ROWS if row["name"] == "float32_gradients_and_adam_make_16_bytes"
    ]
    printed = capsys.readouterr()
    assert printed.out.startswith("1 claim: 0 hold, 0 depend on a condition, 1 do not hold\n")
    assert "97.81 GB" in printed.out
    assert printed.err.startswith("[1/1] 2 bytes in BF16")  # progress, and not in the report


@pytest.mark.parametrize("article", ARTICLES, ids=[article.key for article in ARTICLES])
def test_the_command_knows_every_article(article):
    claims = chosen(articles.CLAIMS, articles_options.arguments(["--article", article.key]))
    assert {one.name for one in claims} == {row["name"] for row in report.of_article(article, ROWS)}


def test_a_claim_that_raises_is_reported_and_the_rest_still_run(capsys):
    assert main([], [raises, made_up]) == 1
    printed = capsys.readouterr().out
    assert "TypeError: no such thing" in printed and "1 could not run" in printed
    first, second = printed.split(FRAMEWORKS.title)
    assert made_up.text in first and made_up.text in second


def test_the_page_shows_every_claim():
    page = (ROOT / "docs" / "articles.md").read_text()
    assert all(f"| {one.text} |" in page for one in articles.CLAIMS)
