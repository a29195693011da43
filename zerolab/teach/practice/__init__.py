"""Steps to write in a notebook: each has a check that answers at once, and hints on request.

tasks: what is asked and how it is checked; threads: ranks as threads of this process, for steps that need a collective.
"""

from zerolab.teach.practice.tasks import TASKS

TRIED: set[str] = set()  # the tasks for which somebody has written something, right or wrong
_shown: dict[str, int] = {}  # hints that were given, by task


def check(name: str, solution) -> bool:
    """Try the reader's `solution`, a function or class, at the task `name`. Print the result; True if it is correct.

    A mistake is a sentence, never a traceback: this runs in a cell of a notebook that must go on.
    """
    try:
        answer = TASKS[name].check(solution)
    except NotImplementedError as blank:
        print(f"not yet: {blank}. A hint: practice.hint({name!r})")
        return False
    except Exception as mistake:  # the reader's own, or what the task found
        TRIED.add(name)
        kind = "" if isinstance(mistake, AssertionError) else f"{type(mistake).__name__}: "
        print(f"not correct yet: {kind}{mistake}")
        return False
    TRIED.add(name)
    print(f"correct: {answer}")
    print(f"Next: {TASKS[name].onward}")
    return True


def hint(name: str) -> None:
    """Print the next hint for the task `name`; after the last one the first again."""
    hints, number = TASKS[name].hints, _shown.get(name, 0)
    print(f"hint {number + 1} of {len(hints)}: {hints[number]}")
    _shown[name] = (number + 1) % len(hints)
