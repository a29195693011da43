"""Run a test on the ranks, and find which of six outcomes it has.

correct         nothing was raised
wrong           an assertion of the test does not hold
refused         the engine raised an error with a message
crash           an error without a message for users, or the process died
hang            a rank waits forever
not applicable  the engine does not document the feature, or the machine lacks something
"""

import functools
import importlib
import os
import pickle
import traceback
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig

from conformance.subjects import subject
from zerolab.run.pool import RankFailed, Reported, run_on_ranks

TESTS = Path(__file__).resolve().parent.parent
WORST = ("crash", "hang", "wrong", "refused", "correct", "not applicable")  # of several cases, the first counts
WITH_A_MESSAGE = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, KeyError)
ACCIDENTS = (TypeError, AttributeError, KeyError, IndexError, NameError)  # unless the engine's file raises them itself
LOST = ("Timed out", "timed out", "Connection closed", "Connection reset", "Connection refused", "Broken pipe")


def outcome_on_ranks(ranks, module, name, arguments, engine):
    """Run a test on `ranks` ranks. Returns (outcome, message)."""
    try:
        answers = run_on_ranks(ranks, run_test, module, name, pickle.dumps(arguments), engine)
    except RankFailed as failed:
        return outcome_of_failure(failed)
    if all(answer[0] == "not applicable" for answer in answers):
        return answers[0]
    return "correct", ""


def outcome_of_failure(failed):
    """(outcome, message) of all ranks together."""
    reports = {}
    for rank, failure in failed.failures.items():
        reports[rank] = failure if isinstance(failure, tuple) else ("crash", failure)
    found = [outcome for outcome, _ in reports.values()]
    rest = [f"rank {rank} died, exit code {code}" for rank, code in failed.died.items()]
    if failed.silent:
        rest.append(f"no answer from the ranks {failed.silent}")
    if failed.died:
        worst = "crash"
    elif "wrong" in found:
        worst = "wrong"  # an assertion on one rank, for which the others wait
    elif "crash" in found:
        worst = "crash"
    else:
        worst = "hang" if failed.silent else min(found, key=WORST.index)
    ranks_of = {}  # message -> the ranks that have it
    for rank, (outcome, text) in sorted(reports.items()):
        if outcome == worst or worst not in found:
            ranks_of.setdefault(text, []).append(rank)
    texts = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()]
    return worst, "\n".join([*texts, *rest])


# On a rank.


@functools.cache
def rewrite_assertions():
    """Have pytest rewrite the assertions of test modules that are imported on a rank, as in the main process."""
    # Configuring pytest installs the import hook that rewrites. No public function does this without running tests.
    _prepareconfig(["--noconftest", "-c", os.devnull, "--rootdir", str(TESTS)])
    pytest.register_assert_rewrite("helpers", "conformance")


def run_test(module, name, arguments, engine):
    """The body of one test, with the engine of that name."""
    rewrite_assertions()
    test = getattr(importlib.import_module(module), name)
    one = None
    try:
        one = subject(engine)
        test(engine=one, **pickle.loads(arguments))
    except pytest.skip.Exception as skipped:
        return "not applicable", skipped.msg
    except BaseException as error:
        raise Reported(report(error, one)) from None
    return "correct", ""


def report(error, one):
    """(outcome, message) of an error that a test raised on this rank."""
    excinfo = pytest.ExceptionInfo.from_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    in_tests = Path(frames[-1].filename).is_relative_to(TESTS)
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, AssertionError) and in_tests or isinstance(error, pytest.fail.Exception):
        outcome = "wrong"
    elif any(text in message for text in LOST):
        outcome = "hang"
    elif refuses(error, frames[-1], one):
        outcome = "refused"
    else:
        outcome = "crash"
    excinfo.traceback = excinfo.traceback.filter(lambda entry: Path(entry.path).name != "on_ranks.py")
    return outcome, str(excinfo.getrepr(style="short"))


def refuses(error, frame, one):
    """Whether the error has a message for users."""
    if not isinstance(error, WITH_A_MESSAGE) or not str(error):
        return False
    in_tests = Path(frame.filename).is_relative_to(TESTS)
    if in_tests and not isinstance(error, RuntimeError):  # torch's C++ has no frames: it raises at the caller's line
        return False
    if isinstance(error, KeyError) and not frame.line.startswith("raise"):  # a key that is missing in a dictionary
        return False
    if one is not None and one.file:  # an error of a torch operation in a user's file is not deliberate
        own = Path(frame.filename).resolve() == Path(one.file).resolve()
        return frame.line.startswith("raise") and (own or not isinstance(error, ACCIDENTS))
    return True
