"""The ranks of the whole suite: `ranks(3)` is a pool of three, started when first asked for."""

import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module", autouse=True)
def without_gpus(request):
    """What a test starts sees no GPU, so that it is the same test on every machine. tests/test_cuda.py sees all."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_cuda":
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def ranks():
    from pool import Pool

    pools: dict[int, Pool] = {}

    def of(world_size: int) -> Pool:
        if world_size not in pools:
            pools[world_size] = Pool(world_size)
        return pools[world_size]

    yield of
    for pool in pools.values():
        pool.let_go()
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def quick_python():
    """The path of a `python` that is started without the seconds of `import torch`, and all that it starts as well."""
    from forked_python import ForkedPython

    with ForkedPython() as executable:
        yield executable


# Further sizes and options of what the tests beside them hold at one size already: only with --thorough, as the
# suite takes ten to thirteen minutes on two cores without them.
FURTHER = (
    r"test_equals_one_process_on_the_whole_batch\[.*\{'.*-[124]\]",
    r"test_elementwise_optimizers\[.*-2\]",
    r"test_every_layout_in_a_loop_of_ones_own\[.*\{'",
    r"test_backwards_add_up\[.*-2\]",
    r"test_models_and_loops_of_ones_own\[.*-[12]\]",
    r"test_one_step_on_integers_is_exact\[.*-[12]\]",
    r"test_repeated_blocks_are_those_that_would_be_recorded\[(hybrid|zero2|zero1_2psi)",
    r"test_dry_placement.*\[tiny-",
    r"test_zero3_peaks_no_higher_than_fsdp2\[(8|3)-\['--(checkpoint|precision)",
    r"test_an_interrupted_report_keeps_what_it_has\[15\]",
    r"test_ways_to_call_backward\[.*-2\]",
    r"test_activation_checkpointing\[.*-2\]",
    r"test_a_bug_beside_the_right_engine",
    r"test_a_collective_may_run_as_late_as_its_wait\[.*-2\]",
)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="further sizes and options of what other tests hold")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: further sizes and options of what other tests hold (--thorough)")


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the tests' names
def pytest_collection_modifyitems(config, items):
    """For `-n 2 --dist loadgroup`: what is started or run once for many tests goes to one worker; the rest by file."""
    # They share the runs of 7b, and what is predicted of it.
    if (
        not config.getoption("--thorough") and len(items) > 1000
    ):  # the whole suite; files and names that are asked for stay
        further = [item for item in items if any(re.search(pattern, item.nodeid) for pattern in FURTHER)]
        config.hook.pytest_deselected(items=further)
        gone = set(further)
        items[:] = [item for item in items if item not in gone]
    if not config.getoption("--thorough"):
        marked = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    together = dict.fromkeys(("test_dry_run", "test_articles"), "dry runs")
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            on_ranks = "ranks" in getattr(item, "fixturenames", ())
            group = "2 ranks" if on_ranks else together.get(item.path.stem, item.path.stem)
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(group))
