"""The ranks of the whole suite: `ranks(3)` is a pool of three, started when first asked for."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
os.environ["OMP_NUM_THREADS"] = "1"


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


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the tests' names
def pytest_collection_modifyitems(config, items):
    """For `-n 2 --dist loadgroup`: what is started or run once for many tests goes to one worker; the rest by file."""
    together = {"test_dry_run": "dry runs", "test_articles": "dry runs"}  # they share the runs of 7b
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            on_ranks = "ranks" in getattr(item, "fixturenames", ())
            group = "ranks" if on_ranks else together.get(item.path.stem, item.path.stem)
            item.add_marker(pytest.mark.xdist_group(group))
