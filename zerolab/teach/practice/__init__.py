"""Steps to write in a notebook: each has a check that answers at once, and hints on request.

tasks: what is asked and how it is checked; threads: ranks as threads of this process, for steps that need a collective.
"""

from zerolab.teach import written
from zerolab.teach.practice.tasks import TASKS

WORDS = written.beside(__file__, "tasks")  # {task: {"hints", "onward"}}
TRIED: set[str] = set()  # the tasks for which somebody has written something, right or wrong
_shown: dict[str, int] = {}  # hints that were given, by task


def check(name: str, solution) -> bool:
    """Try `solution`, the reader's function or class, at the task `name`, and print what came out; True if it is right.

    A mistake is a sentence, never a traceback: this runs in a cell of a notebook that must go on.
    """
    try:
        answer = TASKS[name](solution)
    except NotImplementedError as blank:
        print(f"not yet: {blank}. A hint: practice.hint({name!r})")
        return False
    except Exception as mistake:  # the reader's own, or what the task found
        TRIED.add(name)
        kind = "" if isinstance(mistake, AssertionError) else f"{type(mistake).__name__}: "
        print(f"not right yet: {kind}{mistake}")
        return False
    TRIED.add(name)
    print(f"right: {answer}")
    print(f"Next: {WORDS[name]['onward']}")
    return True


def hint(name: str) -> None:
    """Print the next hint for the task `name`; after the last one the first again."""
    hints, number = WORDS[name]["hints"], _shown.get(name, 0)
    print(f"hint {number + 1} of {len(hints)}: {hints[number]}")
    _shown[name] = (number + 1) % len(hints)
