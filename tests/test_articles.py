"""Every claim of zerolab/teach/articles is run again: verdict and numbers must be those of results/articles.json."""

import json
import re
from dataclasses import replace
from math import inf

import pytest

from zerolab.run.ranks import ROOT
from zerolab.teach import articles
from zerolab.teach.articles import Claim
from zerolab.teach.articles.__main__ import counts, main, markdown, row, text

ROWS = json.loads((ROOT / "results" / "articles.json").read_text())
RECORDED = {(one["article"], one["claim"]): one for one in ROWS}
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")

EACH = [pytest.param(claim, marks=[pytest.mark.thorough] * claim.long, id=claim.claim) for claim in articles.CLAIMS]


def numbers(found: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(found)]


def same_as_recorded(claim: Claim, recorded: dict[str, str]) -> None:
    found, verdict = claim.check()
    assert verdict == recorded["verdict"], found
    if claim.tolerance < inf:
        assert NUMBER.sub("#", found) == NUMBER.sub("#", recorded["found"])
        assert numbers(found) == pytest.approx(numbers(recorded["found"]), rel=claim.tolerance), found


@pytest.mark.parametrize("claim", EACH)
def test_a_claim_gets_its_recorded_verdict_and_numbers(claim):
    same_as_recorded(claim, RECORDED[claim.article, claim.claim])


def test_the_recorded_rows_are_these_claims_each_once():
    assert [(one["article"], one["claim"], one["ran"]) for one in ROWS] == [
        (claim.article, claim.claim, claim.ran) for claim in articles.CLAIMS
    ]
    assert len(RECORDED) == len(ROWS)
    assert all(one["verdict"] != "holds when " for one in ROWS)  # what holds on one side only names its condition


SCALING, WORDPRESS = articles.ARTICLES["scaling"], articles.ARTICLES["wordpress"]
VALUES = [8, 5.43219, 2]
MADE_UP = Claim(SCALING, "a|b", "c", "{} at once, {} in parts, {} alone", lambda: VALUES)


def judged(true: list[bool]):
    return VALUES, *true


@pytest.mark.parametrize(
    "changed, verdict",
    [
        ({"says": [8]}, "does not hold"),  # of 8, 5.4 and 2 all would have to be
        ({"says": [8], "when": "N > 1"}, "holds when N > 1"),  # the first is, the others are not
        ({"says": [8], "at": [0]}, "holds"),
        ({"says": [8, 5.43219, "a word"]}, "does not hold"),  # each has its own
        ({"says": [8, 5.43219], "at": [0, 1], "when": "N > 1"}, "holds when N > 1"),
        ({"says": [5], "off": 0.6}, "holds"),
        ({"between": [[3, inf]], "when": "N > 1"}, "holds when N > 1"),
        ({"less": [[2, 1], [1, 0]]}, "holds"),
        ({"less": [[2, 1], [0, 1]], "when": "N > 1"}, "holds when N > 1"),  # all others are where it is not
        ({"run": judged, "given": {"true": [True]}}, "holds"),
        ({"run": judged, "given": {"true": [True, False]}, "when": "N > 1"}, "holds when N > 1"),
        ({"run": judged, "given": {"true": [False, True]}, "when": "N > 1"}, "does not hold"),
    ],
)
def test_what_gives_a_verdict(changed, verdict):
    assert replace(MADE_UP, **changed).check() == ("8 at once, 5.432 in parts, 2 alone", verdict)


def test_the_command_writes_its_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["--only", "its mixed-precision table", "said nowhere", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())
    assert found == RECORDED[found["article"], found["claim"]]
    printed = capsys.readouterr()
    assert "97.81 GB" in printed.out and "1 claim: 1 does not hold" in printed.out
    assert printed.err.startswith("[1/1] its mixed-precision table")  # progress, apart from the table


def test_a_claim_that_raises_is_a_row_and_the_rest_still_run(capsys):
    assert main([], [replace(MADE_UP, given={"no": "such thing"}), MADE_UP, replace(MADE_UP, says=[8])]) == 1
    printed = capsys.readouterr().out
    assert "TypeError: " in printed and "2 errors" in printed and "5.432 in parts" in printed


def test_the_table_for_github():
    rows = [row(replace(MADE_UP, says=[5], off=1))]
    rows += [{**rows[0], "article": WORDPRESS, "verdict": verdict} for verdict in ("holds when N = 2", "does not hold")]
    lines = markdown(rows).splitlines()
    assert lines[:2] == ["<details>", f"<summary><b>{SCALING}</b>: 1 claim: 1 holds</summary>"]
    assert "| a\\|b | c | 8 at once, 5.432 in parts, 2 alone | **holds** |" in lines
    assert lines[-3].endswith("| **does not hold** |")
    assert all(len(line) <= 120 for line in text(rows).splitlines())
    assert counts(rows[1:] * 2) == "4 claims: 2 hold under a condition, 2 do not hold"


def test_the_page_shows_every_recorded_row():
    """That its tables are those of the file is what `./launch.sh docs --check` holds."""
    shown = (ROOT / "docs" / "articles.md").read_text()
    assert all(f"| {claim.claim} |" in shown for claim in articles.CLAIMS)
