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


def difference(found: str, recorded: str, tolerance: float) -> str:
    """What differs between two lines of words and numbers, where a number may differ by a fraction.

    A percentage has few digits: it may differ by one of the last.
    """
    if NUMBER.sub("#", found) != NUMBER.sub("#", recorded):
        return "the words"
    for new, old in zip(NUMBER.findall(found), NUMBER.findall(recorded)):
        value, kept = (float(number.replace(",", "").rstrip("%")) for number in (new, old))
        digit = 10.0 ** -len(old.rstrip("%").partition(".")[2]) if old.endswith("%") else 0
        if abs(value - kept) > max(tolerance * abs(kept), 1.01 * digit):
            return f"{new} is not {old}"
    return ""


def disagreement(claim: Claim, recorded: dict) -> str:
    """What a new run of the claim says that the recorded row does not; "" if they agree."""
    measured, verdict = claim.check()
    if verdict != recorded["verdict"]:
        return f"{verdict!r} is not {recorded['verdict']!r}: {measured}"
    if claim.tolerance is None:
        return ""
    found = difference(measured, recorded["measured"], claim.tolerance)
    return found and f"{found}: {measured!r} now, {recorded['measured']!r} recorded"


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
    assert disagreement(claim, RECORDED[claim.article, claim.claim]) == ""


def test_the_recorded_rows_are_these_claims_each_once():
    assert [(one["article"], one["claim"], one["ran"]) for one in ROWS] == [
        (claim.article, claim.claim, claim.ran) for claim in articles.CLAIMS
    ]
    assert {claim.claim for claim in articles.CLAIMS} > LONG
    assert len(RECORDED) == len(ROWS) and {one["article"] for one in ROWS} == set(articles.ARTICLES)
    for claim in articles.CLAIMS:
        verdict = RECORDED[claim.article, claim.claim]["verdict"]
        assert verdict in ("holds", "does not hold", f"holds when {claim.when}") and verdict != "holds when "


@pytest.mark.parametrize(
    "measured, true, words",
    (
        ("sends 2.5Ψ in 4 pieces", (True, False), ""),
        ("sends 2.51Ψ in 4 pieces", (True, False), ""),  # within the tolerance
        ("sends 2.5Ψ in 5 pieces", (True, False), "5 is not 4"),
        ("holds 2.5Ψ in 4 pieces", (True, False), "the words"),
        ("sends 2.5Ψ in 4 pieces", (True, True), "'holds' is not"),  # a condition is named only if it decides
        ("sends 2.5Ψ in 4 pieces", (False, False), "'does not hold' is not"),
    ),
)
def test_another_number_or_verdict_is_noticed(measured, true, words):
    recorded = {"measured": "sends 2.5Ψ in 4 pieces", "verdict": "holds when N > 1"}
    found = disagreement(Claim(SCALING, "a claim", "a run", "N > 1", lambda: (measured, *true)), recorded)
    assert found.startswith(words) and bool(found) == bool(words)


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
