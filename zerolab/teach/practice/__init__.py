"""The cells of the notebooks that a reader writes: each has a check that answers at once, and hints on request.

cells.py has the checks and the hints. threads.py runs ranks as threads of this process, for cells with a collective.
"""

from zerolab.teach.practice.cells import CELLS

TRIED: set[str] = set()  # the cells for which somebody has written something, correct or not
_shown: dict[str, int] = {}  # hints that were given, by cell


def check(name: str, solution) -> bool:
    """Try the reader's `solution` of the cell `name`, a function or class. Print the result; True if it is correct.

    A mistake is a sentence, never a traceback: this runs in a cell of a notebook that must go on.
    """
    try:
        answer = CELLS[name].check(solution)
    except NotImplementedError as blank:
        print(f"not yet: {blank}. A hint: practice.hint({name!r})")
        return False
    except Exception as mistake:  # the reader's own, or the check's
        TRIED.add(name)
        kind = "" if isinstance(mistake, AssertionError) else f"{type(mistake).__name__}: "
        print(f"not correct yet: {kind}{mistake}")
        return False
    TRIED.add(name)
    print(f"correct: {answer}")
    print(f"Next: {CELLS[name].onward}")
    return True


def hint(name: str) -> None:
    """Print the next hint for the cell `name`. After the last one comes the first again."""
    hints, number = CELLS[name].hints, _shown.get(name, 0)
    print(f"hint {number + 1} of {len(hints)}: {hints[number]}")
    _shown[name] = (number + 1) % len(hints)
