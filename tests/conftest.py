"""The ranks of the whole suite: `ranks(3)` is a pool of three, started when first asked for."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
from zerolab.run.starter import end_with_starter  # noqa: E402  it lies there, and torch wants these variables first

end_with_starter()  # xdist's worker with xdist, and all that tests start with the test run
# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that: tests send it to some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def without_gpus(request):
    """What a test starts sees no GPU, so that it is the same test on every machine. These see all."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in ("test_cuda", "test_simulated"):
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def pools(make):
    """`of(3)`: what `make(3)` has made, once. For the ranks of fixtures."""
    made = {}

    def of(world_size: int):
        if world_size not in made:
            made[world_size] = make(world_size)
        return made[world_size]

    yield of
    for pool in made.values():
        pool.let_go()
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks():
    from pool import Pool

    yield from pools(Pool)


@pytest.fixture(scope="module")
def on_gpus():
    """`on_gpus(2, function, **arguments)` calls a function of a module on two ranks with GPUs (gpu_ranks.py)."""
    from gpu_ranks import OnGpus

    ranks = OnGpus()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def quick_python():
    """The path of a `python` that is started without the seconds of `import torch`, and all that it starts as well."""
    import forked

    return forked.python()


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also what takes long (tests/long.txt)")
    parser.addoption("--thorough", action="store_true", help="further sizes and options of what other tests hold")
    # For tests/conformance. They are here because pytest reads options before it comes to a folder below.
    parser.addoption("--engine", action="append", default=[], metavar="NAME|FILE", help="ask this engine (repeatable)")
    parser.addoption("--ranks", type=int, help="where a test supports it, on so many ranks")
    parser.addoption("--conform-json", metavar="FILE", help="where to write the outcomes of --engine")
    parser.addoption("--patience", type=int, metavar="SECONDS", help="how long a collective may take: 60")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: left to CI (tests/long.txt, --long, or -m long)")
    config.addinivalue_line("markers", "thorough: further sizes and options of what other tests hold (--thorough)")
    for line in (  # of tests/conformance, whose modules other tests import, too
        "ranks(*numbers, long=()): how many ranks run a test; `long` numbers only with -m long. Default: two",
        "stages(*names): asked of engines that promise to be like one of these stages. Default: of every engine",
        "chapters(*names): the chapters are asked, too. Default: all three",
    ):
        config.addinivalue_line("markers", line)
    config.option.loadscopereorder = False  # xdist would begin with the group of most tests
    if not config.option.markexpr:
        left_out = {"long": config.option.long, "thorough": config.option.thorough}
        config.option.markexpr = " and ".join(f"not {name}" for name, asked in left_out.items() if not asked)


# They share the runs of 7b; and test_train's story goes on meanwhile.
TOGETHER = {
    "test_memory": "dry runs",
    "test_articles": "dry runs",
    "test_train": "2 ranks",
}
# What takes longest begins first, so that both workers end together. The others are short.
LONGEST = ["2 ranks", "dry runs", "test_museum", "test_exercises", "3 ranks", "4 ranks", "test_ranks",
           "test_launch", "test_docs", "test_conform"]  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the tests' names
def pytest_collection_modifyitems(config, items):
    """For `-n 2 --dist loadgroup`: what is started or run once for many tests goes to one worker; the rest by file."""
    place, long = {}, re.compile("|".join((ROOT / "tests/long.txt").read_text().split()))
    for item in items:
        if long.search(item.nodeid):
            item.add_marker("long")
        fixtures, group = getattr(item, "fixturenames", ()), item.get_closest_marker("xdist_group")
        name = group.args[0] if group else TOGETHER.get(item.path.stem, item.path.stem)
        if group is None and config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(name))
        first = LONGEST.index(name) if name in LONGEST else len(LONGEST)
        # tests/test_train.py: its story begins first of all, and what it has left is looked at in the end.
        place[item] = first, "stories" in fixtures, "begun" not in fixtures
    items.sort(key=place.get)
