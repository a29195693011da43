"""Every claim of the articles is measured again: verdict and numbers must equal results/articles.json."""

import json
import re

import pytest

from zerolab.run.ranks import ROOT
from zerolab.teach import articles
from zerolab.teach.articles.__main__ import main
from zerolab.teach.articles.claim import DEPENDS, DOES_NOT_HOLD, HOLDS, Outcome, depends_on, holds_if

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


@pytest.mark.parametrize("claim", cases())
def test_a_claim_has_its_recorded_verdict_and_numbers(claim):
    (recorded,) = [row for row in ROWS if row["name"] == claim.name]
    outcome = claim.check()
    assert (outcome.verdict, outcome.why) == (recorded["verdict"], recorded["why"]), outcome.found
    assert NUMBER.sub("#", outcome.found) == NUMBER.sub("#", recorded["found"])
    assert numbers(outcome.found) == pytest.approx(numbers(recorded["found"]), rel=0.01), outcome.found


def test_all_claims_are_recorded_with_their_texts():
    recorded = [(row["name"], row["claim"]) for row in ROWS]
    assert recorded == [(one.name, one.text) for one in articles.CLAIMS] and len(recorded) == 40
    assert all(row["why"] for row in ROWS if row["verdict"] != HOLDS)


def test_a_condition_is_named_only_if_it_decides():
    assert holds_if(True, "1", why="unused") == Outcome(HOLDS, "1")
    assert depends_on("if N > 1", True, False, "1") == Outcome(DEPENDS, "1", "if N > 1")
    assert depends_on("if N > 1", True, True, "1") == Outcome(HOLDS, "1")
    assert depends_on("if N > 1", False, True, "1").verdict == DOES_NOT_HOLD


def test_the_command_writes_its_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["--only", "Adam's states", "not in any", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["claims"] == [
        row for row in ROWS if row["name"] == "float32_gradients_and_adam_make_16_bytes"
    ]
    printed = capsys.readouterr()
    assert printed.out.startswith("1 claim: 0 hold, 0 depend on a condition, 1 do not hold\n")
    assert "97.81 GB" in printed.out
    assert main(["--only", "not in any"]) == 2
    assert "'not in any' matches none" in capsys.readouterr().err
