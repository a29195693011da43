"""Who trains right, who refuses, who is silently wrong: every property, asked of any engine.

./launch.sh conform                  ours, torch's own, DeepSpeed if installed
./launch.sh conform fsdp2 mine.py 3  these, on three ranks (default: two)
./launch.sh conform zero2.py zero2   a chapter's class, and the engine on it

A chapter is asked what the lesson promises, with the cases in which it does:
all else is not applicable. A property that is not made for so many ranks, as
one of a grid of 2 x 2, has its own number.

An outcome for each engine and property: right; refused (an error in words);
wrong (it trains, and silently differs); crash (an error without words, or the
process has gone); hang; not applicable (it documents nothing of the kind).
The exit status is 0 if no engine is wrong, crashes or hangs.
"""

import argparse
import contextlib
import os
import platform
import re
import sys
import time
from collections import Counter
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from zerolab.measure import tables
from zerolab.properties.property import (
    CHAPTERS,
    GROUPS,
    HERE,
    STAGES,
    NotApplicable,
    examine,
    library,
    raised_at,
    subject,
)
from zerolab.run import engine_file, engines, process_group, ranks
from zerolab.run import options as common
from zerolab.run.command_line import Parser, one_line
from zerolab.run.progress import told

COLLECTIVE = 20  # seconds after which a collective in which ranks wait in vain is a hang; ZERO_TIMEOUT changes it
STARTING = 60  # seconds that ranks may take until they begin
OUTCOMES = ("right", "refused", "wrong", "crash", "hang", "not applicable")
SIGNS = dict(zip(OUTCOMES, ("ok", "refused", "WRONG", "CRASH", "HANG", "-")))
OVER = {"crash", "hang"}  # after which nothing can be asked of these ranks
BAD = {"wrong", *OVER}
WORST = ("crash", "hang", "wrong", "refused", "right", "not applicable")  # of several cases or ranks
IN_WORDS = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)
ACCIDENTS = (TypeError, AttributeError, KeyError, IndexError, NameError)  # no words, unless a file itself raises them


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("conform [ENGINE|FILE.py ...] [N]", description=__doc__, formatter_class=form)
    parser.add_argument("engines", nargs="*", metavar="ENGINE|FILE.py", help="default: those above")
    common.add(parser, "json")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="properties whose name, group or sentence has this text"
    )
    options = parser.parse_args(argv)
    given, options.ranks = options.engines, 2
    if given and given[-1].isdecimal():
        options.ranks = int(given.pop())
    if not 1 <= options.ranks <= 8:
        raise ValueError(f"N must be 1 to 8 ranks, got {options.ranks}")
    files = [name for name in given if name.endswith(".py") and name not in CHAPTERS]
    os.environ.setdefault("ZERO_TIMEOUT", str(COLLECTIVE))
    process_group.timeout()  # raises, too
    named = [name for name in given if name not in files] + engine_file.enter(files, "conform")
    named = named or [*CHAPTERS, *filter(engines.installed, engines.named("conform"))]
    options.names = [name for name in named if name in CHAPTERS]
    if others := [name for name in named if name not in CHAPTERS]:
        options.names += engines.chosen(",".join(others), "conform")
    options.properties = []
    for name, each in library().items():
        if options.only.lower() in f"{name}\n{each.group}\n{each.says}".lower():
            options.properties.append(name)
    if not options.properties:
        raise ValueError(f"--only {options.only!r}: no property has that in its name, group or sentence")
    process_group.check_writable("--json", options.json)
    return options


# On a rank.


def outcome(name: str, engine: str, size: int) -> dict:
    """{"outcome", "says"} of this rank: the worst of all cases that the tests ask on so many ranks."""
    each, found = library()[name], []
    cases = cases_on(each, size, engine)
    if not cases:
        says = "the chapter does not promise it" if engine in CHAPTERS else f"it is of {', '.join(each.engines)} alone"
        return verdict("not applicable", says)
    for case in cases:
        found.append(_of_case(name, engine, case))
        if found[-1]["outcome"] in OVER:
            break
    return worst(found)


def verdict(outcome: str, says: str) -> dict:
    return {"outcome": outcome, "says": says}


def worst(verdicts: list[dict]) -> dict:
    return min(verdicts, key=lambda each: WORST.index(each["outcome"]))


def cases_on(each, size: int, engine: str) -> list[dict]:
    """The cases that the tests ask of this stage or chapter on so many ranks; of others' engines those of any."""
    ours = engine in STAGES or engine in CHAPTERS
    asked = [case for case in each.cases if case.ranks == size and (engine == case.engine or not ours)]
    chosen = [case for case in asked if not case.thorough] or asked
    return list({repr(case.arguments): case.arguments for case in chosen}.values())


def size_of(each, wanted: int) -> int:
    """On how many ranks it is asked: as many as wanted, if that is one of its sizes."""
    sizes = [case.ranks for case in sorted(each.cases, key=lambda case: case.thorough)]
    return wanted if wanted in sizes else sizes[0]


def _of_case(name: str, engine: str, case: dict) -> dict:
    try:
        findings = examine(name, subject(engine), case)
    except NotApplicable as reason:
        return verdict("not applicable", str(reason))
    except Exception as error:
        said = f"{type(error).__name__}: {error}".strip()
        if process_group.lost(said):
            return verdict("hang", said.splitlines()[0])
        # A RuntimeError comes out of torch's C++, which has no line. Others of a property's own line are no words.
        where, line = raised_at(error)
        ours = where.parent == HERE
        words = isinstance(error, IN_WORDS) and str(error) and (not ours or isinstance(error, RuntimeError))
        # In a user's file somebody must have written the error: of torch's operations it is an accident, too.
        if file := file_of(engine):
            own = where.resolve() == Path(file).resolve()
            words = words and line.startswith("raise") and (own or not isinstance(error, ACCIDENTS))
        return verdict("refused" if words else "crash", said)
    return verdict("wrong", f"{findings[0]}\n  asked     {in_names(case)}") if findings else verdict("right", "")


def file_of(engine: str) -> str | None:
    """The user's file that the engine comes from."""
    return None if engine in CHAPTERS else engines.ENGINES[engine].file


def in_names(case) -> str:
    """A case as text: classes and functions by their names, and an optimizer's class with its options."""
    if isinstance(case, partial):
        return f"{case.func.__name__}({in_names(case.keywords)})"
    if isinstance(case, dict):
        return ", ".join(f"{key}={in_names(value)}" for key, value in case.items()) or "without options"
    if isinstance(case, tuple | list):
        return f"({', '.join(map(in_names, case))})"
    return getattr(case, "__name__", str(case))


def on_ranks(engine: str, file: str, names: str, folder: str) -> None:
    """One property after the other, each verdict said as it comes. After a hang or a crash nothing can be said.

    `file` is the engine's, or empty; `names` are those of the properties, with commas between them.
    """
    rank = ranks.begin(folder)
    engine_file.enter([file] if file else [], "conform")
    ranks.say(folder, "here", rank, {})
    ranks.everyone(folder, "here", int(os.environ["WORLD_SIZE"]), STARTING)  # so that none waits for another's imports
    me = process_group.start("gloo", "cpu")
    torch.set_num_threads(1)
    for name in names.split(","):
        torch.manual_seed(1000 + rank)
        ranks.say(folder, name, rank, outcome(name, engine, me.world_size))
        # One that says nothing is ended, with all others, by who has started them.
        everyone = ranks.everyone(folder, name, me.world_size, 2 * longest())
        if any(each is None or each["outcome"] in OVER for each in everyone):
            os._exit(1)  # these ranks may be in any state: others go on
    process_group.stop()


# What starts them.


def longest() -> float:
    """Seconds that one property may take on an engine, all its cases together."""
    return 3 * process_group.timeout()


def tell(engine: str, name: str, found: dict) -> None:
    if found["outcome"] in BAD:
        first = found["says"].replace("\n", " ")
        print(tables.wrapped(f"  {engine}, {name}: {found['outcome'].upper()}: {first[:300]}"), flush=True)


def outcomes_of(engine: str, names: list[str], size: int) -> dict[str, dict]:
    """{property: outcome of all ranks together}: in ranks of their own, and in new ones after a crash or a hang."""
    found, left = {}, list(names)
    while left:
        command = ["-m", "zerolab.properties.conform", "--on-ranks", engine, file_of(engine) or "", ",".join(left)]
        began = len(found)
        with ranks.Ranks(command, size, STARTING + longest(), quiet=True) as running:
            for name, (_, verdicts) in zip(told(left, engine), running.verdicts(left)):
                found[name] = over_the_ranks(verdicts)
                tell(engine, name, found[name])
                if found[name]["outcome"] in OVER:
                    break
                running.until = time.monotonic() + longest()
        if len(found) == began:
            says = without_places(f"its ranks have not begun: {running.last_words()}")
            dead = verdict("crash", says)
            tell(engine, "all", dead)
            return found | dict.fromkeys(left, dead)
        left = [name for name in names if name not in found]
    return found


def over_the_ranks(verdicts: list[dict]) -> dict:
    """One outcome of all ranks': the worst, and of a death what killed them."""
    for each in verdicts:
        if each.get("status") == "died":
            late = "had not come to its end" in each["error"]
            each |= verdict("hang" if late else "crash", each["error"])
    one = worst(verdicts)
    return verdict(one["outcome"], without_places(one["says"]))


def without_places(said: str) -> str:
    """`said`, without what is of this machine alone: of files their names stay, of addresses in memory nothing."""
    said = re.sub(r"\b0x[0-9a-f]{6,}", "0x...", said)
    return re.sub(r"(?<![\w:/.])/[^\s\"',:;()]+", lambda path: Path(path[0]).name, said)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["deepspeed"] = metadata.version("deepspeed")
    return found


def outcomes_table(results: dict[str, dict], counts: list[Counter]) -> str:
    """Properties by engines, in their groups; then how many of each outcome."""
    rows = []
    first, *_ = results.values()
    for name in sorted(first, key=lambda name: GROUPS.index(library()[name].group)):
        rows.append([name, library()[name].group, *(SIGNS[found[name]["outcome"]] for found in results.values())])
    for each in OUTCOMES:
        rows.append([f"in all: {each}", "", *(str(count[each]) for count in counts)])
    return "\n".join(tables.text([["property", "group", *results], *rows], left=range(2 + len(results))))


def main() -> None:
    with one_line(ValueError):
        options = arguments()
    sizes = {name: size_of(library()[name], options.ranks) for name in options.properties}
    said = ", ".join(f"{count} on {size}" for size, count in sorted(Counter(sizes.values()).items()))
    print(f"{len(sizes)} properties, ranks over gloo: {said}; each engine in ranks of its own", flush=True)

    results, counts = {}, []
    for number, engine in enumerate(options.names, 1):
        started = time.perf_counter()
        print(f"{engine} ({number} of {len(options.names)})", flush=True)
        found = {}
        for size in sorted(set(sizes.values())):
            names = [name for name in sizes if sizes[name] == size]
            found |= outcomes_of(engine, names, size)
        results[engine] = {name: found[name] for name in options.properties}
        report = {"versions": versions(), "ranks": options.ranks, "engines": results}
        common.write_json(options.json, report, whole=False)  # after each engine: it takes minutes
        counts.append(Counter(each["outcome"] for each in found.values()))
        said = ", ".join(f"{counts[-1][each]} {each}" for each in OUTCOMES if counts[-1][each])
        print(f"  {said}; {time.perf_counter() - started:.0f} s", flush=True)
    print("\n" + outcomes_table(results, counts))
    with one_line(ValueError):
        common.write_json(options.json, report)
    sys.exit(1 if sum(counts, Counter()).keys() & BAD else 0)


if __name__ == "__main__":
    process_group.run(lambda: on_ranks(*sys.argv[2:]) if sys.argv[1:2] == ["--on-ranks"] else main())
