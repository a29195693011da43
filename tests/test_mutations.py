"""For every wrong chapter a test of the default suite is named that fails with it."""

import contextlib
import io
import sys

import pytest
from mutations import OTHERS, RIGHT, mutated_source
from test_deleted_lines import DELETED

from zerolab.run import pool
from zerolab.run.ranks import ROOT

MUTATIONS = [*(mutation for mutation, _, _ in DELETED), *OTHERS]


def test_every_mutation_fits_its_chapter_and_has_a_test():
    """The chapters are edited, and most mutations are only tried by long tests."""
    problems = []
    for mutations in (*([each] for each in MUTATIONS), *RIGHT.values()):
        try:
            mutated_source(*mutations)
        except LookupError as error:
            problems.append(str(error))
    for mutation in MUTATIONS:
        file, _, test = mutation.found_by.partition("::")
        if not test or f"def {test}(" not in (ROOT / "tests" / file).read_text():
            problems.append(f"{mutation}: there is no test {mutation.found_by!r}")
    assert not problems, "\n".join(problems)


class PoolThatImports(pool.Pool):
    """Its ranks import the chapters from the folder `chapters`, if they are there."""

    chapters = None

    def __init__(self, ranks, timeout):
        super().__init__(ranks, timeout)
        self.run(import_again, (str(self.chapters),), {})


def import_again(folder):
    """On a rank: forget the project's modules, which its server has imported. The rank's own program stays."""
    for name in set(sys.modules) - {"zerolab.run.pool", __name__}:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(ROOT)) and "site-packages" not in file:
            del sys.modules[name]
    sys.path.insert(0, folder)


@contextlib.contextmanager
def ranks_that_import(folder):
    """Inside, ranks import the chapter in this folder. Earlier ranks and this process keep the project's."""
    before = dict(pool.pools)
    pool.pools.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "TIMEOUT", 20)
        patch.setattr(pool, "Pool", PoolThatImports)
        patch.setattr(PoolThatImports, "chapters", folder)
        yield
    for each in pool.pools.values():
        each.kill()
    pool.pools.clear()
    pool.pools.update(before)


def run_with(mutation, folder, *arguments):
    """(pytest's exit status, what it prints) of some tests, on ranks that import the wrong chapter."""
    (folder / f"{mutation.chapter}.py").write_text(mutated_source(mutation))
    line = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *arguments]
    printed = io.StringIO()
    with ranks_that_import(folder), contextlib.redirect_stdout(printed):
        status = pytest.main(line)
    return int(status), printed.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_named_test_finds_a_mutation(tmp_path, mutation):
    status, printed = run_with(mutation, tmp_path, str(ROOT / "tests" / mutation.found_by))
    assert status == 1, printed
