"""Every claim of harness/teach/articles is run again: verdict and numbers must be those of results/articles.json."""

import json
import re
from pathlib import Path

import pytest

from harness.teach import articles
from harness.teach.articles import Claim
from harness.teach.articles.__main__ import COLUMNS, counts, main, markdown, row, text
from harness.teach.articles.claim import SCALING, WORDPRESS, Claims

ROOT = Path(__file__).parent.parent
ROWS = json.loads((ROOT / "results" / "articles.json").read_text())
RECORDED = {(one["article"], one["claim"]): one for one in ROWS}
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?%?")


def value(number: str) -> float:
    return float(number.replace(",", "").rstrip("%"))


def near(number: str, tolerance: float):
    """What equals `number` but for a fraction. A percentage has few digits: it may differ by one of the last."""
    digit = 10.0 ** -len(number.rstrip("%").partition(".")[2]) if number.endswith("%") else 0
    return pytest.approx(value(number), rel=tolerance, abs=1.01 * digit)


# Each takes seconds of a processor for what others hold too: the engines of tests/test_memory.py at their largest,
# torch's own engines side by side (tests/test_launch.py), and the planner's predictions (tests/test_plan.py).
LONG = {
    "7B in fp32 under DDP: 28 + 28 + 56 = 112 GB",
    "under ZeRO-1: 28 + 28 + 7 = 63 GB",
    "under ZeRO-2: 28 + 3.5 + 7 = 38.5 GB",
    "FSDP1 is less optimized than FSDP2",
    "ZeRO-2 costs what ZeRO-1 does, so nobody would use ZeRO-1",
    "ZeRO is not worth it for small models such as BERT",
    "network topology limits scaling",
    "bad setups serialize communication and compute",
    "too-small buckets increase overhead",
}
EACH = [
    pytest.param(claim, marks=[pytest.mark.thorough] * (claim.claim in LONG), id=claim.claim)
    for claim in articles.CLAIMS
]


@pytest.mark.parametrize("claim", EACH)
def test_a_claim_gets_its_recorded_verdict_and_numbers(claim):
    recorded = RECORDED[claim.article, claim.claim]
    found, verdict = claim.check()
    assert verdict == recorded["verdict"], found
    if claim.tolerance is not None:
        assert NUMBER.sub("#", found) == NUMBER.sub("#", recorded["found"])
        numbers = [near(number, claim.tolerance) for number in NUMBER.findall(recorded["found"])]
        assert [*map(value, NUMBER.findall(found))] == numbers, found


def test_the_recorded_rows_are_these_claims_each_once():
    assert [(one["article"], one["claim"], one["ran"]) for one in ROWS] == [
        (claim.article, claim.claim, claim.ran) for claim in articles.CLAIMS
    ]
    assert {claim.claim for claim in articles.CLAIMS} > LONG
    assert len(RECORDED) == len(ROWS) and {one["article"] for one in ROWS} == set(articles.ARTICLES)
    for claim in articles.CLAIMS:
        verdict = RECORDED[claim.article, claim.claim]["verdict"]
        assert verdict in ("holds", "does not hold", f"holds when {claim.when}") and verdict != "holds when "


def test_named_numbers_become_words():
    claims = Claims()
    claims.scaling("a", "b", "", lambda: ({"zero3": 1.23456, "bytes": 1234567, "words": "few"}, True))
    assert claims[0].check() == ("ZeRO-3 1.235, bytes 1,234,567, words few", "holds")


@pytest.mark.parametrize(
    "says, when, verdict",
    (
        (8, "", "does not hold"),  # of 8, 5 and 2 all would have to be
        (8, "N > 1", "holds when N > 1"),  # the first is, the last is not
        (2, "N > 1", "does not hold"),
        (lambda number: number > 1, "", "holds"),
        (lambda number: number > 1, "N > 1", "holds"),
        (lambda number: number > 2, "N > 1", "holds when N > 1"),
    ),
)
def test_a_claim_about_one_number(says, when, verdict):
    claims = Claims()
    claims.scaling("a", "b", when, {"at once": 8, "in parts": 5, "alone": 2}, says=says)
    assert claims[0].check() == ("8 at once, 5 in parts, 2 alone", verdict)


def test_the_command_writes_its_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["--only", "9.8 s", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())
    assert tuple(found) == COLUMNS and found == RECORDED[found["article"], found["claim"]]
    printed = capsys.readouterr()
    assert "0.98 s" in printed.out and "1 claim: 1 does not hold" in printed.out
    assert printed.err.startswith("[1/1] an all-reduce of 14 GB")  # progress, apart from the table


def test_a_claim_that_raises_is_a_row_and_the_rest_still_run(monkeypatch, capsys):
    def fail():
        raise RuntimeError("no\nsuch thing")

    broken = Claim(WORDPRESS, "broken 9.8 s", "nothing", "", fail)
    claims = [broken, *(claim for claim in articles.CLAIMS if "9.8 s" in claim.claim)]
    monkeypatch.setattr("harness.teach.articles.__main__.CLAIMS", claims)
    assert main(["--only", "9.8 s"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such thing" in printed and "1 error" in printed and "0.98 s" in printed


def test_the_table_for_github():
    rows = [row(Claim(SCALING, "a|b", "c", "", lambda: ("d", True)))]
    rows += [{**rows[0], "article": WORDPRESS, "verdict": verdict} for verdict in ("holds when N = 2", "does not hold")]
    lines = markdown(rows).splitlines()
    assert lines[:2] == ["<details>", f"<summary><b>{SCALING}</b>: 1 claim: 1 holds</summary>"]
    assert "| a\\|b | c | d | **holds** |" in lines and lines[-3].endswith("| **does not hold** |")
    assert all(len(line) <= 110 for line in text(rows).splitlines())
    assert counts(rows[1:] * 2) == "4 claims: 2 hold under a condition, 2 do not hold"


def test_the_page_shows_every_recorded_row_and_begins_with_zero():
    """That its tables are those of the file is what `./launch.sh docs --check` holds."""
    shown = (ROOT / "docs" / "articles.md").read_text()
    places = [shown.index(f"| {claim.claim} |") for claim in articles.CLAIMS]
    assert places[: len(articles.ZERO)] == sorted(places[: len(articles.ZERO)])
    assert max(places[: len(articles.ZERO)]) < min(places[len(articles.ZERO) :])
