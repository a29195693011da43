"""The museum of bugs: a stage with a mistake trains next to the correct one, and you see only the symptom.

./launch.sh bug               the list
./launch.sh bug 7             two ranks train with the correct stage, then with number 7: losses, bytes, collectives
./launch.sh bug 7 4           the same on four ranks
./launch.sh bug 7 --clue      the symptom, and a question to think about
./launch.sh bug 7 --hint      which method to look at
./launch.sh bug 7 --answer    what is wrong, why it goes unnoticed, the code, and the test that catches it
"""

import os
import sys
from functools import partial
from itertools import zip_longest

import torch.distributed as dist

from zerolab.measure import tables
from zerolab.run import process_group, ranks
from zerolab.run.command_line import one_line
from zerolab.teach import museum_options
from zerolab.teach.museum.exhibits import EXHIBITS
from zerolab.teach.museum.loop import BATCH, BYTES, SHAPE, visit

TIMEOUT = 10  # seconds until a collective that hangs raises an error. The visitor waits for this


# What is printed.


def catalogue():
    """The titles of the exhibits, by chapter."""
    lines = [__doc__.splitlines()[0]]
    stage = None
    for exhibit in EXHIBITS.values():
        if exhibit.stage != stage:
            stage = exhibit.stage
            engines = "Beyond the chapters"
            lines += ["", engines if stage == "engines" else f"{stage}.py"]
        lines.append(f"{exhibit.number:>4}  {exhibit.title}")
    lines += [
        "",
        "./launch.sh bug 3 runs one. Then --clue prints a question, --hint the place, and --answer the answer.",
    ]
    return "\n".join(lines)


def explanation(exhibit, asked):
    """The symptom, and the part that was asked for: "clue", "hint" or "answer"."""
    text = exhibit.text
    paragraphs = [f"Bug {exhibit.number}: {exhibit.title}", tables.wrapped(f"Symptom: {text['Symptom']}")]
    if asked == "answer":
        for label in ("Answer", "Unnoticed", "Read"):
            paragraphs.append(tables.wrapped(f"{label}: {text[label]}"))
        paragraphs.append(f"Caught by: {exhibit.caught_by}")
        test = f"tests/test_museum.py::test_the_test_that_it_names_fails_with_it[{exhibit.number}]"
        paragraphs.append(f"To see the test fail: ./launch.sh test '{test}'")
        paragraphs += [f"The code, {exhibit.file.relative_to(ranks.ROOT)}:", exhibit.code]
    else:
        following = "hint" if asked == "clue" else "answer"
        paragraphs.append(tables.wrapped(text[asked.capitalize()]))
        paragraphs.append(f"Next: ./launch.sh bug {exhibit.number} --{following}")
    return "\n\n".join(paragraphs)


def report(correct, wrong):
    """Two tables from the results of `visit` on all ranks: one with all steps, one of the last step."""
    all_ranks = range(len(correct))
    rows = [["", *(f"correct, rank {rank}" for rank in all_ranks), *(f"this one, rank {rank}" for rank in all_ranks)]]
    for key, label in (("losses", "loss"), ("norms", "gradient norm"), ("scales", "loss scale after")):
        for step, values in enumerate(zip_longest(*(each[key] for each in [*correct, *wrong])), start=1):
            rows.append([f"{label}, step {step}", *("-" if value is None else f"{value:.5f}" for value in values)])
    lines = tables.text(rows, rule=False)
    if wrong[0]["counted"]:
        rows = [["rank 0, last step", "correct", "this one"]]
        for line, number in correct[0]["counted"].items():
            pair = number, wrong[0]["counted"][line]
            if not any(pair):
                continue
            if line in BYTES:
                rows.append([f"{line}, kB", *(f"{each / 1e3:,.0f}" for each in pair)])
            else:
                rows.append([line, *(str(each) for each in pair)])
        lines += ["", *tables.text(rows, rule=False)]
    for rank in all_ranks:
        if wrong[rank]["error"]:
            lines += ["", tables.wrapped(f"rank {rank} {wrong[rank]['error']}")]
    return "\n".join(lines)


# The command, and the function that runs on every rank.


def on_ranks(exhibit):
    """Train with the correct stage and then with the wrong one. Rank 0 prints the results of all ranks."""
    world = process_group.start("gloo", "cpu")
    reports = dist.new_group()  # another group, which still works after a collective has failed
    world.print(f"A GPT of {SHAPE.layers} layers, {BATCH} x {SHAPE.seq} tokens per rank, {exhibit.steps} steps.")
    world.print("Each rank has its own batches and its own seed; a stage starts all ranks with rank 0's weights.\n")
    found = []
    for build in (exhibit.correct, exhibit.build):
        of_ranks = [None] * world.world_size
        dist.all_gather_object(of_ranks, visit(exhibit, build, world.rank), group=reports)
        found.append(of_ranks)
    correct, wrong = found
    world.print(report(correct, wrong))
    world.print(f"\nWhat is wrong, and where? Then: ./launch.sh bug {exhibit.number} --clue, --hint, and --answer")
    dist.barrier(reports)


def start(exhibit, world_size):
    """Start the ranks. Returns their exit status."""
    print(f"Bug {exhibit.number}: {exhibit.title}\n", flush=True)
    variables = {}
    if exhibit.differs & {"timeout", "error"}:
        variables["ZERO_TIMEOUT"] = str(TIMEOUT)
    command = [sys.executable, *ranks.torchrun(world_size), "-m", "zerolab.teach.museum", str(exhibit.number)]
    with ranks.started(command, env=ranks.environment(**variables)) as process:
        return process.wait()


def main(argv=None):
    options = museum_options.arguments(argv)
    if options.number is None:
        print(catalogue())
        return 0
    exhibit = EXHIBITS[options.number]
    if options.asked:
        print(explanation(exhibit, options.asked))
    elif "RANK" in os.environ:
        process_group.run(partial(on_ranks, exhibit))
    else:
        with one_line():
            return start(exhibit, options.ranks)
    return 0
