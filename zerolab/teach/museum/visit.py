"""A visit to the museum of bugs: a wrong engine and the right one train side by side, and only the symptom is shown.

./launch.sh bug               the exhibits, without what is wrong with them
./launch.sh bug 7             two ranks train with the right engine, then with number 7: losses, bytes, collectives
./launch.sh bug 7 --clue      the symptom in words, and what to think of
./launch.sh bug 7 --hint      in which method to look
./launch.sh bug 7 --answer    what is wrong, where to read, the lines that do it, and the test that catches it
"""

import argparse
import gc
import math
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch.distributed as dist

from zerolab.engine import checkpoint
from zerolab.measure import tables
from zerolab.measure.held import held_bytes
from zerolab.measure.memory_parts import GATHERED, PartsLedger
from zerolab.measure.timeline import Timeline
from zerolab.measure.watched_step import watched_step
from zerolab.properties.shared_folder import shared_folder
from zerolab.run import process_group, ranks
from zerolab.run.command_line import Parser, one_line
from zerolab.teach.museum.exhibits import EXHIBITS, Exhibit, exhibit_of
from zerolab.teach.museum.loop import SHAPE, TIMEOUT, Loop, Training

RANKS, MOST_RANKS = 2, 16


def nothing_yet() -> dict:
    return {"losses": [], "norms": [], "scales": [], "error": None, "counted": None}


def train(loop: Loop, found: dict) -> None:
    """Train, and write down in `found` what a user can see, as soon as it is there: an exhibit may not come far."""
    saved = {}
    with PartsLedger() as memory:
        engine = loop.build()
        for step in range(loop.training.steps):
            if step == loop.training.reload_at:
                state = engine.full_state_dict()
                del engine
                engine = loop.build(100)
                engine.load_full_state_dict(state)
            if step == loop.training.resume_at:
                with shared_folder(engine.group) as folder:
                    # An exhibit may have a way of its own.
                    save, load = (getattr(type(engine), way, getattr(checkpoint, way)) for way in ("save", "load"))
                    save(engine, folder)
                    saved["checkpoint"] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
                    del engine
                    engine = loop.build(100)
                    load(engine, folder)
                saved["optimizer after resuming"] = held_bytes(engine)["optimizer"]
            counted = train_a_step(loop, engine, step, memory, found)
    sizes = counted.pop("sizes") | saved
    found["counted"] = {f"{line}, kB": round(nbytes / 1e3) for line, nbytes in sizes.items()} | counted


def train_a_step(loop: Loop, engine, step: int, memory: PartsLedger, found: dict) -> dict:
    """One step, watched: {line of the report: how many}, and {line: bytes} as "sizes"."""
    inside, peaks, gathered = 0, Counter(), 0
    with watched_step(engine, memory) as seen, Timeline() as timeline:
        for moment, number in loop.moments(engine, step):
            if number is not None:
                found[moment].append(number)
            else:
                inside = seen.count["all-reduce"] + seen.count["reduce-scatter"]
    for moment in memory.moments():
        peaks[moment.phase] = max(peaks[moment.phase], moment.live)
        if moment.phase == "1 forward":
            gathered = max(gathered, moment.parts[GATHERED])
    sizes = {f"{part} held": nbytes for part, nbytes in seen.held.items()}
    sizes |= {"peak in forward": peaks["1 forward"], "peak in backward": peaks["2 backward"]}
    sizes |= {"units gathered at once in forward": gathered, "sent per step": seen.sent_bytes}
    hidden = timeline.computed_meanwhile("all-reduce", "reduce-scatter")
    return {
        "sizes": sizes,
        **{f"{kind}s per step": seen.count[kind] for kind in ("all-reduce", "reduce-scatter", "all-gather")},
        "reductions sent inside backward": inside,
        "reductions that travel while the rank computes": sum(hidden),
    }


def visit(exhibit: Exhibit, engine_cls: type, rank: int, group=None) -> dict:
    """What the exhibit's right or wrong engine shows on this rank; what it raises is part of it.

    `group` is the ranks' group, in which something may hang.
    """
    found = nothing_yet()
    try:
        train(Loop(exhibit, engine_cls, rank, group), found)
    except Exception as error:
        found["error"] = f"stopped after {len(found['losses'])} losses: {type(error).__name__}: {error}"
    gc.collect()
    return found


# The report.


def rows(right: list[dict], wrong: list[dict]) -> list[tuple[str, int, int]]:
    """(line, right engine, this one) of what is counted in the last step, on rank 0. Both have come to their end.

    What neither has is left out. An all-gather of `clip_grad_norm_` is among the others.
    """
    ours, theirs = right[0]["counted"], wrong[0]["counted"]
    return [(line, ours[line], theirs[line]) for line in ours if ours[line] or theirs[line]]


def differences(right: list[dict], wrong: list[dict]) -> set[str]:
    """Names of the report's lines in which the wrong engine's differ, from `Exhibit.differs`; peaks by 10% and more.

    A gloo thread lets go of a collective's buffers a moment after `wait()`, so that a peak may have one of them more.
    """
    found = set()
    if errors := "".join(ours["error"] or "" for ours in wrong):
        return {"timeout" if "Timed out" in errors else "error"}
    for key in ("losses", "norms", "scales"):
        for a, b in zip(right, wrong):
            pairs = zip(a[key], b[key])
            if any(not math.isclose(x, y, rel_tol=1e-5) for x, y in pairs):  # NaN is not close to itself
                found.add(key)
    for line, a, b in rows(right, wrong):
        if abs(a - b) > (0.1 * a if line.startswith("peak") else 0):
            found.add(line.removesuffix(", kB").removesuffix(" per step").removesuffix(" held"))
    return found


def report(right: list[dict], wrong: list[dict]) -> str:
    """What a user would see of the two, a list entry per rank each."""
    numbers = range(len(right))
    table = [["", *(f"right, rank {rank}" for rank in numbers), *(f"this, rank {rank}" for rank in numbers)]]
    for key, label in (("losses", "loss"), ("norms", "gradient norm"), ("scales", "loss scale after")):
        for step, found in enumerate(zip_longest(*(each[key] for each in (*right, *wrong))), start=1):
            values = ["-" if number is None else f"{number:.5f}" for number in found]
            table.append([f"{label}, step {step}", *values])
    lines = tables.text(table, rule=False)
    if wrong[0]["counted"]:
        counted = [(line, f"{ours:,}", f"{theirs:,}") for line, ours, theirs in rows(right, wrong)]
        lines += ["", *tables.text([("rank 0, last step", "right", "this"), *counted], rule=False)]
    for rank in numbers:
        if wrong[rank]["error"]:
            lines += ["", tables.wrapped(f"rank {rank} {wrong[rank]['error']}")]
    return "\n".join(lines)


def catalogue() -> str:
    """The chapters' exhibits, and in a second row those of what only engines do."""
    chapters, engines = [], []
    for exhibit in EXHIBITS.values():
        row = engines if exhibit.of_engine else chapters
        row.append(f"{exhibit.number:>3}  {exhibit.stage}  {exhibit.title}")
    beside = "In what only engines do: clipping, loss scaling, checkpoints, offload (session 5 of docs/classroom.md)"
    more = (
        "./launch.sh bug 3 runs one (bug 3 4: on four ranks). Then --clue says what to think of, --hint where to look, "
        "--answer all."
    )
    return tables.wrapped("\n".join([__doc__.splitlines()[0], "", *chapters, "", beside, "", *engines, "", more]))


# {option: its help}: what is told, and nothing run.
ASKED = {
    "clue": "tell what to think of, and run nothing",
    "hint": "tell where to look, and run nothing",
    "answer": "tell what is wrong, and run nothing",
}


def told(exhibit: Exhibit, asked: str) -> str:
    """The exhibit's name and symptom. Then what to think of; or in which method to look; or all, and who catches it."""
    parts = {
        "clue": [f"Think of this: {exhibit.clue}"],
        "hint": [f"Look at: {exhibit.read.partition(':')[0]}"],
        "answer": [f"The mistake: {exhibit.diagnosis}", f"Where to read: {exhibit.read}"],
    }
    lines = [f"Bug {exhibit.number}, {exhibit.stage}: {exhibit.title}", ""]
    for part in (f"The symptom: {exhibit.symptom}.", *parts[asked]):
        lines.append(tables.wrapped(part))
    if asked != "answer":
        following = "hint" if asked == "clue" else "answer"
        lines += ["", f"And if that does not help: ./launch.sh bug {exhibit.number} --{following}"]
        return "\n".join(lines)
    marks = "" if exhibit.of_engine else " (-: the right lines, +: these)"
    lines += ["", f"What a student has written{marks}:", "", exhibit.written.rstrip(), ""]
    lines.append("Caught by (right engines have this property, this one has not):")
    lines += [f"  ./launch.sh test tests/test_properties.py -k {name}" for name in exhibit.caught_by]
    lines.append(f'To see it caught: ./launch.sh test tests/test_museum.py -k "stops_it and [{exhibit.number}-"')
    return "\n".join(lines)


# The command, and what it starts on every rank.


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("bug [NUMBER [N]]", description=__doc__.splitlines()[0])
    parser.add_argument("number", nargs="?", help=f"1 to {len(EXHIBITS)}; without it: the list")
    parser.add_argument("ranks", metavar="N", nargs="?", type=int, default=RANKS, help=f"ranks (default {RANKS})")
    for name, help in ASKED.items():
        parser.add_argument(f"--{name}", action="store_const", const=name, dest="asked", help=help)
    parser.add_argument("--on-ranks", help=argparse.SUPPRESS)  # by torchrun: the folder for what each rank finds
    options = parser.parse_args(argv)
    options.exhibit = None if options.number is None else exhibit_of(options.number)
    if options.exhibit is None and options.asked:
        raise ValueError(f"--{options.asked} needs the number of a bug, 1 to {len(EXHIBITS)}")
    if not 2 <= options.ranks <= MOST_RANKS:
        raise ValueError(f"N must be 2 to {MOST_RANKS} ranks, got {options.ranks}")
    return options


def on_ranks(exhibit: Exhibit, folder: Path) -> None:
    """What every rank does: say what the right engine shows, and then what the wrong one does."""
    ranks.begin(folder)
    me = process_group.start("gloo", "cpu")
    # A short timeout for what may hang, and only for that: on a busy machine a right rank may be late, too.
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    ranks.say(folder, "right", me.rank, visit(exhibit, exhibit.right, me.rank))
    wrong = visit(exhibit, exhibit.wrong, me.rank, group)
    ranks.say(folder, "wrong", me.rank, wrong)
    if wrong["error"]:  # the others fail in this step, too: let them say how
        ranks.everyone(folder, "wrong", me.world_size, 5 * TIMEOUT)
    else:
        process_group.stop()


def show(exhibit: Exhibit, world_size: int = RANKS) -> int:
    """Run it on ranks of its own, which may hang or die, and print what was seen. Returns the exit status."""
    print(f"Bug {exhibit.number}, {exhibit.stage}: {exhibit.title}\n", flush=True)
    command = ["-m", "zerolab.teach.museum", str(exhibit.number), "--on-ranks"]
    with ranks.Ranks(command, world_size, seconds=300, quiet=True, ZERO_TIMEOUT="60") as started:
        found = dict(started.verdicts(["right", "wrong"]))
    if not all(each.get("counted") for each in found.get("right", [{}])):
        print(started.text, *found.get("right", ()), sep="\n", file=sys.stderr)
        print("error: the right engine did not come to its end, see above", file=sys.stderr)
        return 1
    wrong = [nothing_yet() | each for each in found["wrong"]]  # a rank that died has its error alone
    training = Training(**exhibit.training)
    print(f"A GPT of {SHAPE.layers} layers, {world_size} gloo ranks on the CPU; {training.steps} steps, {training}.")
    print(
        "The right engine first, then the one with the bug, from the same seeds and on the same batches. Each rank\n"
        "has a batch and a seed of its own: the engine brings rank 0's weights to all.\n"
    )
    print(report(found["right"], wrong))
    if found["right"] == found["wrong"]:
        print("\nNo number differs: that is what to explain.")
    print(f"\nWhat is wrong, and where? Then: ./launch.sh bug {exhibit.number} --clue, --hint, and --answer")
    return 0


def main(argv: list[str] | None = None) -> int:
    with one_line(ValueError):
        options = arguments(argv)
    exhibit = options.exhibit
    if options.on_ranks:
        process_group.run(partial(on_ranks, exhibit, Path(options.on_ranks)))
    if exhibit is None:
        print(catalogue())
    elif options.asked:
        print(told(exhibit, options.asked))
    else:
        with one_line():
            return show(exhibit, options.ranks)
    return 0
