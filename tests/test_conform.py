"""`conform` on engines of files: one that is right, and others that are wrong, refuse, crash, or hang."""

import json
import re
from pathlib import Path

import forked
import pytest

from tests.test_engine_file import LISTING, ROOT, STEP
from zerolab.properties.conform import (
    OUTCOMES,
    arguments,
    cases_on,
    in_names,
    outcome,
    over_the_ranks,
    size_of,
    versions,
    without_places,
)
from zerolab.properties.property import CHAPTERS, GROUPS, STAGES, library

LAST = "        dist.all_reduce(self.gradients)\n"
# {engine: (what is put into the page's listing, and where; the outcome; words of it)}
ENGINES = {
    "fine": (STEP, STEP, "right", ""),
    "sums": ("        self.gradients /= self.world_size\n", "", "wrong", "the mean of gradients"),
    "refuses": (STEP, STEP + "        raise TypeError('not today')\n", "refused", "not today"),
    "trips": (STEP, STEP + "        None + 1\n", "crash", "TypeError: unsupported operand"),
    "dies": (STEP, STEP + "        __import__('os')._exit(3)\n", "crash", ""),
    "parts": (LAST, f"        if dist.get_rank() == 0:\n    {LAST}", "hang", ""),
}


def conform(tmp_path, *names: str):
    """Engines of files on one property: a start of ranks for each, so a test asks no more than it needs."""
    files = {name: tmp_path / f"{name}.py" for name in names}
    for name, file in files.items():
        old, new, *_ = ENGINES[name]
        assert old in LISTING
        file.write_text(LISTING.replace(old, new))
    words = [*map(str, files.values()), "2", "--only", "a_step_on_integers", "--json", str(tmp_path / "found.json")]
    run = forked.launch("conform", *words, ZERO_TIMEOUT="3")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["versions"] == versions() and found["ranks"] == 2 and list(found["engines"]) == [*names]
    for name in names:
        (verdict,) = found["engines"][name].values()
        assert set(verdict) == {"outcome", "says"}
        *_, outcome, words = ENGINES[name]
        assert verdict["outcome"] == outcome and words in verdict["says"], (name, verdict)
        assert re.search(rf"in all: {outcome} ", run.stdout)
    return run


def test_wrong_crash_and_hang_are_told_apart_and_the_others_engines_go_on(tmp_path):
    run = conform(tmp_path, "sums", "dies", "trips", "parts")
    assert run.returncode == 1, run.stdout + run.stderr


def test_right_and_refused_engines_end_it_with_status_0(tmp_path):
    run = conform(tmp_path, "fine", "refuses")
    assert run.returncode == 0, run.stdout + run.stderr


def test_who_is_silent_until_the_time_is_over_hangs_and_who_is_gone_has_crashed(monkeypatch):
    monkeypatch.setenv("ZERO_TIMEOUT", "3")
    right = {"outcome": "right", "says": ""}
    for error, verdict in (("had not come to its end after 9 s, and was ended", "hang"), ("exit status 3", "crash")):
        assert over_the_ranks([right, {"status": "died", "error": error}])["outcome"] == verdict


@pytest.mark.parametrize(
    "said, kept",
    (
        ("<Big object at 0x7f31a0c2b790> is none", "<Big object at 0x...> is none"),
        ('File "/opt/env/lib/site-packages/torch/nn/x.py", line 9', 'File "x.py", line 9'),
        ("[/build/me/gloo/pair.cc:553] closed; /home/me/mine.py", "[pair.cc:553] closed; mine.py"),
        ("see https://pytorch.org/docs/a.html, 3/4 of 0x10", "see https://pytorch.org/docs/a.html, 3/4 of 0x10"),
    ),
)
def test_what_is_said_names_no_place_of_this_machine(said, kept):
    assert without_places(said) == kept
    assert over_the_ranks([{"outcome": "crash", "says": said}])["says"] == kept


def test_every_property_says_what_must_be_true_and_is_asked_of_every_engine():
    assert len(library()) >= 95
    for name, each in library().items():
        assert each.group in GROUPS and each.says.endswith("."), name
        size = size_of(each, 2)
        assert cases_on(each, size, "ddp"), name
        assert not any("<" in in_names(case.arguments) for case in each.cases), name  # no raw Python
        ours = {case.engine for case in each.cases}
        usual = {case.engine for case in each.cases if not case.thorough}
        assert ours == usual or not usual, f"{name} is left to --thorough for a stage"
        assert ours and all(cases_on(each, size, engine) for engine in ours), name


def test_a_chapter_has_a_row_and_is_asked_what_it_promises_and_nothing_else(monkeypatch):
    monkeypatch.setenv("ZERO_TIMEOUT", "3")
    assert {*CHAPTERS, *STAGES, "ddp"} <= {*arguments([]).names} and arguments(["zero2.py", "3"]).names == ["zero2.py"]
    promised = {name for name, each in library().items() if cases_on(each, size_of(each, 2), "zero2.py")}
    assert {"a_gradient_that_is_missing_or_sparse_is_refused", "held_bytes_equal_the_theory"} < promised
    left = "clipping_takes_the_norm_of_the_whole_model"
    assert left not in promised and outcome(left, "zero2.py", 3)["outcome"] == "not applicable"


def test_the_results_that_the_page_shows_are_of_all_properties():
    for file in Path(ROOT, "results").glob("conform-*.json"):
        found = json.loads(file.read_text())["engines"]
        for name, verdicts in found.items():
            assert set(verdicts) <= set(library()), name
            assert {each["outcome"] for each in verdicts.values()} <= set(OUTCOMES)
            assert all(each["says"] == without_places(each["says"]) for each in verdicts.values()), name
