"""Which engines are asked, on how many ranks; and the body of a test runs on the ranks."""

import pytest

from conformance import report
from conformance.on_ranks import outcome_on_ranks
from conformance.subjects import CHAPTERS, STAGES, subject
from zerolab.run import pool

# The options are in tests/conftest.py, because pytest reads them before it comes here.


def pytest_configure(config):
    pool.PRELOADED.append("conformance.preloaded")
    if config.getoption("patience"):
        pool.TIMEOUT = config.getoption("patience")
    if config.getoption("engine"):
        config.pluginmanager.register(report.Report(config), "conformance report")


@pytest.fixture(autouse=True)
def ranks():
    """The number of ranks."""


@pytest.fixture
def engine():
    """The engine's name; on the ranks, the `Subject` with that name."""


def pytest_generate_tests(metafunc):
    if "engine" not in metafunc.fixturenames:
        return
    test = metafunc.definition
    given = metafunc.config.getoption("engine")
    names = given or [name for name in (*STAGES, *CHAPTERS) if not reason_against(test, subject(name))]
    cases = []
    for name in names:
        reason = reason_against(test, subject(name))
        cases.append(pytest.param(name, marks=[pytest.mark.skip(reason=reason)] if reason else []))
    if not cases:  # a test for `./launch.sh check` alone. pytest's own mark for no case cannot be sent to xdist
        cases = [pytest.param("none", marks=pytest.mark.skip(reason="it tests none of our engines"))]
    metafunc.parametrize("engine", cases)
    metafunc.parametrize("ranks", numbers_of_ranks(test, metafunc.config.getoption("ranks")))


def reason_against(test, one):
    """Why a test is not asked of an engine; "" if it is."""
    stages = test.get_closest_marker("stages")
    if stages is not None and one.like not in stages.args:
        return f"it tests only our {', '.join(stages.args)}"
    if one.chapter and test.get_closest_marker("chapters") is None:
        return "the chapter does not promise it"
    needs = test.get_closest_marker("needs")
    if needs is not None and not one.ours and needs.args[0] not in one.documented.supports:
        return one.says_nothing_of(needs.args[0])
    return ""


def numbers_of_ranks(test, wanted):
    """The numbers of the marker `ranks`, or the `wanted` one, if it is among them."""
    marker = test.get_closest_marker("ranks")
    usual = marker.args if marker else (2,)
    more = marker.kwargs.get("thorough", ()) if marker else ()
    if wanted:
        return [wanted if wanted in (*usual, *more) else usual[0]]
    return [*usual, *(pytest.param(number, marks=pytest.mark.thorough) for number in more)]


def pytest_collection_modifyitems(items):
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.user_properties.append(("engine", item.callspec.params["engine"]))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """The body of a test that gets an engine runs on the ranks. A failure has the message of each rank."""
    if "engine" not in pyfuncitem.fixturenames:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames if name != "engine"}
    name = pyfuncitem.funcargs["engine"]
    module, function = pyfuncitem.module.__name__, pyfuncitem.originalname
    outcome, message = outcome_on_ranks(pyfuncitem.funcargs["ranks"], module, function, arguments, name)
    pyfuncitem.user_properties += [("outcome", outcome), ("message", message)]
    if outcome == "not applicable":
        pytest.skip(message)
    if outcome == "refused" and not subject(name).ours:
        pytest.skip(f"refused: {message}")
    if outcome != "correct":
        pytest.fail(f"{outcome.upper()}\n{message}", pytrace=False)
    return True
