"""The options of every command, with argparse.

A function per command: it takes the words behind the command's name (default: this process's), and returns the options.
A mistake ends the process with one line and exit status 2. Imports only the standard library, so `--help` and mistakes
are answered at once, before torch is imported.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import re
import shlex
import sys
import time
import tomllib
from pathlib import Path

from zerolab.run.command_line import Parser, did_you_mean

PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
SHAPE = ("layers", "width", "heads", "vocab")  # of a model, in place of the preset's
CHAPTERS = ("zero1", "zero2", "zero3")

# Names that have their place in a module which imports torch. Tests hold that they are the same.
ENGINES = (  # zerolab/run/engines.py
    *("single", "ddp", "zero1", "zero1_2psi", "zero_redundancy_optimizer", "zero2", "fsdp2_no_reshard", "hybrid"),
    *("zero3", "zero3-prefetch0", "fsdp2", "fsdp1", "fsdp1_article", "deepspeed1", "deepspeed2", "deepspeed3"),
)
TIMED = ("ddp", "zero1", "zero_redundancy_optimizer", "zero2", "fsdp2_no_reshard", "zero3", "fsdp2")
BY_DEFAULT = {"compare": ("single", *TIMED), "bench": TIMED}  # what they run without --engines
SWEEPS = ("bucket size, zero1", "bucket size, zero2", "units", "prefetch", "activations")  # zerolab/measure/sweeps.py
EXERCISES = (  # zerolab/teach/exercises
    *("zero1", "zero1_2psi", "zero2", "zero3", "clip_gradients", "micro_batches", "uneven_units", "own_prefetch"),
    *("hidden_reduction", "two_machines"),
)


# Types of options: the text that was typed becomes a value, or an error.


def whole_number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text}")
    return number


def positive_int(text: str) -> int:
    return whole_number(text, 1)


def non_negative_int(text: str) -> int:
    return whole_number(text, 0)


def vocabulary(text: str) -> int:
    return whole_number(text, 256)  # text is bytes


def non_negative_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number, 0 or more, got {text}")
    return number


def preset(text: str) -> str:
    if text not in PRESETS:
        near = did_you_mean(text, PRESETS)
        raise argparse.ArgumentTypeError(f"no preset {text!r}{near} There are: {', '.join(PRESETS)}")
    return text


def existing_file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return text


def rank_and_seconds(text: str) -> tuple[int, float]:
    """(1, 0.05) from "1:0.05"."""
    found = re.fullmatch(r"(\d+):(\d*\.?\d+)", text)
    if found is None or float(found[2]) > 60:
        raise argparse.ArgumentTypeError(f"must be a rank and 0 to 60 seconds, as 1:0.05, got {text!r}")
    return int(found[1]), float(found[2])


# Options that several commands have.


def add_preset(parser, default: str = "tiny") -> None:
    names = ", ".join(PRESETS)
    parser.add_argument("--preset", type=preset, default=default, help=f"model shape: {names} (default {default})")


def add_seq(parser) -> None:
    parser.add_argument("--seq", type=positive_int, help="tokens per sequence (default: the preset's maximum)")


def add_steps(parser, default: int) -> None:
    parser.add_argument("--steps", type=positive_int, default=default, help=f"training steps (default {default})")


def add_batch(parser, default: int) -> None:
    parser.add_argument(
        "--batch", type=positive_int, default=default, help=f"sequences per rank and step (default {default})"
    )


def add_accumulate(parser) -> None:
    parser.add_argument(
        "--accumulate",
        type=positive_int,
        default=1,
        help="backwards per step, each on a part of the batch (default 1)",
    )


def add_checkpoint_activations(parser) -> None:
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in backward")


def add_dtype(parser) -> None:
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 computes and gathers in bfloat16 (default fp32)"
    )


def add_training(parser) -> None:
    """What is trained on, and how."""
    parser.add_argument(
        "--data", type=existing_file, help="a file to train on (default: the Python standard library's sources)"
    )
    parser.add_argument("--lr", type=non_negative_float, default=1e-3, help="AdamW's learning rate (default 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default 0)")


def add_hardware(parser) -> None:
    backends = ("auto", "gloo", "nccl", "xccl")
    parser.add_argument("--backend", choices=backends, default="auto", help="nccl is for CUDA (default auto)")
    devices = ("auto", "cpu", "cuda", "xpu")
    parser.add_argument("--device", choices=devices, default="auto", help="cuda is for AMD, too (default auto)")
    parser.add_argument("--anyway", action="store_true", help="start even if there is not enough free memory")


def add_engines(parser) -> None:
    parser.add_argument("--engines", metavar="NAME,NAME", help="run only these (an unknown name prints the list)")


def add_engine_file(parser) -> None:
    parser.add_argument(
        "--engine-file",
        metavar="FILE.py",
        action="append",
        default=[],
        help="your own engine, see docs/your-engine.md; may be given several times",
    )


def add_json(parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")


# Checks of several options together.


def check_engines(parser: Parser, options: argparse.Namespace) -> None:
    """Whether --engines names engines, and --engine-file files. The command checks whether it can run them."""
    known = list(ENGINES)
    for given in getattr(options, "engine_file", []):
        path = Path(given)
        if path.suffix != ".py" or not path.is_file():
            parser.error(
                f"--engine-file {given}: it must be a file whose name ends in .py, and {path.resolve()} is not"
            )
        known.append(path.stem)
    if options.engines is None:
        return
    names = [name.strip() for name in options.engines.split(",") if name.strip()]
    if not names:
        parser.error(f"--engines is empty; there are: {', '.join(known)}")
    for name in names:
        if name not in known:
            parser.error(f"no engine {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}")


def check_seq(parser: Parser, options: argparse.Namespace) -> None:
    """Without --seq it is all that the preset has."""
    most = PRESETS[options.preset]["seq"]
    if options.seq is None:
        options.seq = most
    if options.seq > most:
        parser.error(f"--seq {options.seq}, but preset {options.preset} has {most} positions at most")


def check_batch(parser: Parser, options: argparse.Namespace) -> None:
    if options.batch % options.accumulate:
        parser.error(f"--batch must be a multiple of --accumulate {options.accumulate}, but it is {options.batch}")


def check_writable(option: str, path: str | None) -> None:
    """Raise ValueError for a file that cannot be written, before the work that it is for.

    The file is opened, because permissions are not the only reason, and left unchanged. Ranks do not ask again.
    """
    if path is None or "RANK" in os.environ:
        return
    new = not os.path.exists(path)
    try:
        open(path, "a").close()
    except OSError as error:
        raise ValueError(f"cannot write {option} {path!r}: {error.strerror}") from error
    if new:
        os.remove(path)


def check_folder(folder: Path, instead: str) -> None:
    """Raise ValueError if no file can be written into `folder`, which may not exist yet. Leaves everything as it was.

    `instead` is what the user can say to write somewhere else.
    """
    if "RANK" in os.environ:
        return
    new, file = not folder.exists(), folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        file.write_bytes(bytes(4096))  # a full disk accepts an empty file
        file.unlink()
    except OSError as error:
        where = folder.absolute()
        raise ValueError(f"cannot write to {where}: {error.strerror}. Start elsewhere, or use {instead}") from error
    if new:
        with contextlib.suppress(OSError):  # another command may have put a file there meanwhile
            folder.rmdir()


# The commands.


def compare(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("compare [N]", description="One GPT under DDP, our stages and torch's own: who trains alike?")
    add_preset(parser)
    add_engines(parser)
    add_engine_file(parser)
    add_steps(parser, 40)
    parser.add_argument(
        "--timed-steps",
        type=non_negative_int,
        default=12,
        help="steps to time per engine, 0 for none (default 12)",
    )
    add_dtype(parser)
    add_seq(parser)
    add_batch(parser, 4)
    add_accumulate(parser)
    add_checkpoint_activations(parser)
    add_training(parser)
    parser.add_argument(
        "--slow-rank", type=rank_and_seconds, metavar="RANK:SECONDS", help="delay a rank in every timed step, as 1:0.05"
    )
    add_hardware(parser)
    add_json(parser)
    parser.add_argument("--breakdown", action="store_true", help="also print what each rank's step time is spent on")
    parser.add_argument("--quick", action="store_true", help="a toy model and few steps: a verdict in under a minute")
    options = parser.parse_args(argv)
    if options.quick:  # other defaults; what was typed still counts
        parser.set_defaults(preset="toy", steps=5, timed_steps=5)
        options = parser.parse_args(argv)
    check_engines(parser, options)
    check_seq(parser, options)
    check_batch(parser, options)
    for name in ("slow_rank", "breakdown"):
        if getattr(options, name) and not options.timed_steps:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} is about timed steps, and --timed-steps 0 leaves none: leave out one of them")
    check_writable("--json", options.json)
    if options.json is None:
        check_folder(Path("runs"), "--json FILE")
    return options


def zero1(argv: list[str] | None = None) -> argparse.Namespace:
    return chapter("zero1", argv)


def zero2(argv: list[str] | None = None) -> argparse.Namespace:
    return chapter("zero2", argv)


def zero3(argv: list[str] | None = None) -> argparse.Namespace:
    return chapter("zero3", argv)


def chapter(name: str, argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(f"{name} [N]", description=f"{name}.py: a few training steps, then one step event by event.")
    add_preset(parser)
    parser.add_argument("--steps", type=positive_int, default=5, help="training steps, 2 or more (default 5)")
    add_batch(parser, 4)
    add_accumulate(parser)
    if name == "zero3":
        parser.add_argument("--prefetch", type=non_negative_int, default=1, help="units to gather ahead (default 1)")
    else:
        parser.add_argument(
            "--bucket-mb", type=non_negative_float, default=2.0, help="MiB; 0: one per parameter (default 2.0)"
        )
    add_checkpoint_activations(parser)
    add_training(parser)
    parser.add_argument("--map", action="store_true", help="print which ranks own which parameter, all of them")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a Chrome/Perfetto trace of one more step, and of step 0, to this file"
    )
    add_hardware(parser)
    options = parser.parse_args(argv)
    options.chapter = name
    if options.steps < 2:  # the first creates the optimizer's state, the last is printed event by event
        parser.error(f"--steps must be 2 or more, got {options.steps}")
    check_batch(parser, options)
    check_writable("--trace", options.trace)
    return options


def train(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("train STAGE [N]", description="A training run that resumes: the same command goes on.")
    parser.add_argument("stage", metavar="STAGE", choices=CHAPTERS, help=", ".join(CHAPTERS))
    parser.add_argument("--folder", type=Path, help="checkpoints and losses.jsonl (default runs/STAGE-PRESET)")
    add_preset(parser)
    add_steps(parser, 200)
    parser.add_argument(
        "--global-batch",
        type=positive_int,
        default=8,
        help="sequences per step, of all ranks together (default 8)",
    )
    add_dtype(parser)
    parser.add_argument(
        "--save-every", type=positive_int, default=50, help="steps from checkpoint to checkpoint (default 50)"
    )
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write losses and rates for TensorBoard")
    add_training(parser)
    add_hardware(parser)
    options = parser.parse_args(argv)
    if options.folder is None:
        options.folder = Path(f"runs/{options.stage}-{options.preset}")
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        install = f"{shlex.quote(sys.executable)} -m pip install tensorboard"
        parser.error(f"--tensorboard needs the package tensorboard, which is not installed: {install}")
    return options


def bench(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("bench [N]", description="Step times of engines and options that make their steps in turn.")
    add_preset(parser)
    parser.add_argument("--layers", type=positive_int, help="blocks, in place of the preset's")
    parser.add_argument("--width", type=positive_int, help="width of the blocks")
    parser.add_argument("--heads", type=positive_int, help="heads of attention")
    parser.add_argument("--vocab", type=vocabulary, help="tokens that the model knows; text is bytes")
    add_engines(parser)
    add_engine_file(parser)
    parser.add_argument("--rounds", type=positive_int, default=15, help="timed steps of each engine (default 15)")
    add_batch(parser, 4)
    add_seq(parser)
    add_hardware(parser)
    add_json(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--sweeps",
        nargs="?",
        const="",
        metavar="WORDS",
        help="what options cost; only those with WORDS in their name (wrong ones list them)",
    )
    instead.add_argument(
        "--host",
        nargs="?",
        const="",
        metavar="ENGINE",
        help="the host's time per step, on many small parameters; with ENGINE also where it goes",
    )
    instead.add_argument(
        "--ratios",
        nargs="+",
        type=existing_file,
        metavar="FILE",
        help="ratios of step times, out of files of compare --json",
    )
    options = parser.parse_args(argv)
    parser.beside("--ratios")
    parser.beside("--host", "--rounds", "--json")
    shape = [f"--{name}" for name in SHAPE]
    parser.beside(
        "--sweeps", "--preset", *shape, "--rounds", "--batch", "--seq", "--backend", "--device", "--json", "--anyway"
    )
    check_engines(parser, options)
    if options.sweeps is not None and not any(options.sweeps in name for name in SWEEPS):
        parser.error(f"--sweeps {options.sweeps!r} is in none of: {'; '.join(SWEEPS)}")
    if options.host:
        check_engines(parser, argparse.Namespace(engines=options.host))
    check_seq(parser, options)
    options.shape = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    shape = PRESETS[options.preset] | options.shape
    if shape["width"] % shape["heads"]:
        parser.error(f"the width must be a multiple of the heads, got width {shape['width']}, heads {shape['heads']}")
    check_writable("--json", options.json)
    return options


def memory(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("memory [N]", description="The memory and traffic of one rank of N, by a dry run.")
    parser.add_argument("ranks", metavar="N", nargs="?", type=int, help="ranks, 1 to 1,000,000 (default 8)")
    parser.add_argument(
        "--up-to", type=positive_int, metavar="N", help="in place of N: 1, 2, 4, ... up to so many ranks, peaks only"
    )
    add_preset(parser, "7b")
    add_engines(parser)
    add_dtype(parser)
    add_seq(parser)
    add_batch(parser, 1)
    add_accumulate(parser)
    add_checkpoint_activations(parser)
    add_json(parser)
    parser.add_argument(
        "--device",
        choices=("fake", "cuda", "xpu"),
        default="fake",
        help="fake: no memory is used; cuda (or xpu): real allocations",
    )
    options = parser.parse_args(argv)
    check_engines(parser, options)
    check_seq(parser, options)
    check_batch(parser, options)
    if options.up_to and options.ranks:
        parser.error(f"--up-to {options.up_to} chooses the numbers of ranks: leave out the {options.ranks} before it")
    if options.ranks is None:
        options.ranks = 8
    if not 1 <= options.ranks <= 10**6:
        parser.error(f"N must be 1 to 1,000,000 ranks, got {options.ranks}")
    check_writable("--json", options.json)
    return options


def articles(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("articles", description="Runs the claims of five articles, and prints which of them hold.")
    names = ("multiple_gpus", "sharding_state", "frameworks", "scaling", "wordpress")
    parser.add_argument("--article", choices=names, help="only the claims of this article")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only claims with a TEXT in their sentence or name"
    )
    add_json(parser)
    options = parser.parse_args(argv)
    check_writable("--json", options.json)
    return options


def docs(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("docs", description="Writes the generated parts of README.md and docs/, and draws the figures.")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--check", action="store_true", help="write nothing, and list the pages that are stale")
    instead.add_argument("--figure", metavar="NAME", help="draw this figure, and write no page")
    parser.add_argument(
        "--from",
        metavar="FILE",
        nargs="+",
        type=existing_file,
        dest="source",
        help="with --figure: draw it from this, not from results/",
    )
    parser.add_argument("--out", help="the figures' folder (default results/figures of the project)")
    options = parser.parse_args(argv)
    parser.beside("--check")
    parser.needs("--from", "--figure")
    return options


def exercise(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("exercise NAME", description="A chapter with blanks, or a task, to be written by you.")
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    parser.add_argument(
        "--hints", type=int, choices=(0, 1, 2), default=1, help="hints above each blank; 0: only its target (default 1)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file even if it was edited")
    return parser.parse_args(argv)


def check(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("check NAME [N]", description="Checks an exercise step by step: passed, or expected and found.")
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    parser.add_argument("ranks", nargs="?", metavar="N", type=positive_int, help="2 or more ranks (default 3)")
    parser.add_argument(
        "--hint", action="count", default=0, help="the next hint for the step that has not passed; twice: the next two"
    )
    parser.add_argument("--file", type=Path, help="another file than exercises/NAME.py")
    parser.add_argument("--folder", type=Path, help="all Python files in it: a table of points, and exit status 0")
    parser.add_argument(
        "--seconds", type=float, default=60, help="for one training of a step, which takes about one (default 60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="other weights and data (default 0)")
    parser.add_argument("--json", help="write the points, with what was expected and found, to this file")
    options = parser.parse_args(argv)
    if options.seconds < 1:
        parser.error(f"--seconds must be 1 or more, got {options.seconds:g}")
    if machines() != 1:
        parser.error("check runs on one machine: unset NNODES")
    parser.beside("--folder", "--seconds", "--seed", "--json")
    if options.folder and not any(options.folder.glob("*.py")):
        parser.error(f"--folder {options.folder}: there is no Python file in it")
    check_writable("--json", options.json)
    return options


def bug(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("bug [NUMBER [N]]", description="A museum of bugs: without NUMBER the list, else one of them runs.")
    parser.add_argument("number", nargs="?", help="the number of a bug; without it: the list")
    parser.add_argument("ranks", metavar="N", nargs="?", type=int, default=2, help="2 to 16 ranks (default 2)")
    for name, what in (
        ("clue", "the symptom, and a question to think about"),
        ("hint", "which method to look at"),
        ("answer", "what is wrong, why it goes unnoticed, and the code"),
    ):
        parser.add_argument(f"--{name}", action="store_const", const=name, dest="asked", help=f"print {what}")
    options = parser.parse_args(argv)
    files = Path(__file__).parents[1].joinpath("teach", "museum", "exhibits").glob("[0-9]*.py")
    numbers = {int(file.stem.partition("_")[0]) for file in files}
    if options.number is None and options.asked:
        parser.error(f"--{options.asked} needs the number of a bug, 1 to {max(numbers)}")
    if options.number is not None and not (options.number.isdecimal() and int(options.number) in numbers):
        parser.error(f"no bug {options.number!r}: the numbers are 1 to {max(numbers)}")
    if not 2 <= options.ranks <= 16:
        parser.error(f"N must be 2 to 16 ranks, got {options.ranks}")
    return options


def report(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("report [FOLDER]", description="Measures this machine within a few minutes, and writes one page.")
    folder = time.strftime("report-%Y%m%d-%H%M%S")
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help="a new folder (default: report-DATE-TIME)")
    parser.add_argument("--minutes", type=non_negative_float, default=10, help="for all (default 10)")
    options = parser.parse_args(argv)
    if options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(f"{str(options.folder)!r} is not empty: name a new or an empty folder")
    return options


def conform(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "conform [ENGINE|FILE.py ...] [N]", description="Which engines train correctly, refuse, or are silently wrong?"
    )
    parser.add_argument(
        "engines",
        nargs="*",
        metavar="ENGINE|FILE.py",
        help="zero2 for an engine, zero2.py for the chapter, or your own file "
        "(default: our engines, the chapters, torch's own, DeepSpeed if installed)",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="tests whose name has this text (pytest's -k)")
    parser.add_argument("--thorough", action="store_true", help="also further sizes, options and numbers of ranks")
    add_json(parser)
    options = parser.parse_args(argv)
    options.ranks = 2
    if options.engines and options.engines[-1].isdecimal():
        options.ranks = int(options.engines.pop())
    if not 1 <= options.ranks <= 8:
        parser.error(f"N must be 1 to 8 ranks, got {options.ranks}")
    for name in options.engines:
        if not name.endswith(".py"):
            check_engines(parser, argparse.Namespace(engines=name))
    check_writable("--json", options.json)
    return options


def watch(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("watch [ENGINE] [N]", description="Records a step of real ranks, and writes a page for a browser.")
    parser.add_argument(
        "engine", nargs="?", help="the engine to open with (default zero3; an unknown name prints the list)"
    )
    parser.add_argument("ranks", nargs="?", help="2 to 16 (default: one per GPU, without GPUs 2)")
    add_engines(parser)
    add_engine_file(parser)
    parser.add_argument("--bug", metavar="NUMBER", help="a bug from the museum next to the correct engine")
    add_preset(parser)
    add_hardware(parser)
    add_json(parser)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (default 2)")
    parser.add_argument("--seq", type=int, help="tokens per sequence (default 32: few, so that state is visible)")
    parser.add_argument("--bucket-mb", type=non_negative_float, help="MiB of a bucket (default: the engine's)")
    parser.add_argument("--tries", type=int, default=5, help="record this many steps and keep the fastest (default 5)")
    parser.add_argument("--out", metavar="FILE", help="the page (default watch-ENGINE.html)")
    parser.add_argument("--from", metavar="FILE", dest="source", help="record nothing: use the recordings in this file")
    parser.add_argument("--gif", metavar="FILE", help="also draw the engine as an animation (in Chromium; slow)")
    parser.add_argument("--dark", action="store_true", help="the animation in dark colours")
    parser.add_argument("--on-ranks", help=argparse.SUPPRESS)  # by torchrun: the folder for what each rank has seen
    options = parser.parse_args(argv)
    shown = ("--bug", "--from", "--engines", "--out", "--json", "--gif", "--dark", "--on-ranks")
    parser.beside("--bug", *shown, "--tries")  # its model is always the same
    parser.beside("--from", *shown)
    parser.needs("--dark", "--gif")
    if options.ranks is None and options.engine is not None and options.engine.isdecimal():
        options.engine, options.ranks = None, options.engine  # ./launch.sh watch 2
    check_engines(parser, options)
    return options


def plan(argv: list[str] | None = None) -> argparse.Namespace:
    gpus = ("b200", "h200", "h100", "h100-96gb", "a100", "rtx4090", "rtx3090", "l4", "t4")  # extra/planner/hardware.py
    parser = Parser("plan [N]", description="How long a step would take on hardware that is not here.")
    add = parser.add_argument
    add("--preset", type=preset, help=f"model shape: {', '.join(PRESETS)} (default 7b)")
    add("--layers", type=int, help="blocks, instead of a preset; with --width, --heads, --vocab, --seq")
    add("--width", type=int, help="width of the blocks")
    add("--heads", type=int, help="heads of attention")
    add("--kv-heads", type=int, help="heads of keys and values (default: as many)")
    add("--ffn", type=int, help="width inside the MLP (default: 4 times the width)")
    add("--vocab", type=int, help="tokens that the model knows")
    add("--seq", type=int, help="tokens per sequence (default: the preset's)")
    add("--gated", action="store_true", help="a gated MLP: three weights and not two")
    add("--tied", action="store_true", help="embedding and head share one weight (presets do, other shapes do not)")
    add("--gpu", choices=gpus, default="h100", help="(default h100)")
    add("ranks", metavar="N", nargs="?", type=int, default=64, help="GPUs in all (default 64)")
    add("--ranks-per-node", type=int, default=8, help="GPUs in a node (default 8)")
    add("--engines", metavar="NAME,NAME", help="plan only these (an unknown name prints the list)")
    add("--dtype", choices=("fp32", "bf16"), default="bf16", help="over float32 gradients and weights (default bf16)")
    add("--micro-batch", type=int, default=1, help="sequences per rank and backward (default 1)")
    add("--accumulate", type=int, default=1, help="micro-batches per step (default 1)")
    recomputed = ("none", "blocks", "selective")
    add("--checkpoint-activations", choices=recomputed, default="none", help="computed again in backward")
    add("--prefetch", type=int, default=1, help="units that zero3 and hybrid gather ahead (default 1)")
    add("--bucket-mb", type=float, help="MiB of a bucket of ddp, zero1 and zero2 (default: their own)")
    add("--intra-GBps", type=float, help="a GPU's links inside a node, GB/s per direction (default: the GPU's)")
    add("--network", choices=("infiniband", "roce", "efa"), help="between the nodes (default infiniband)")
    add("--inter-GBps", type=float, help="instead of --network: what a ring across nodes reaches, GB/s")
    add("--alpha-us", type=float, help="instead of --network: microseconds of a hop in a collective across nodes")
    add("--efficiency", type=float, help="share of the peak of matrix products (default: the GPU's, see --validate)")
    sweeps = ("ranks", "bandwidth", "micro-batch", "bucket", "prefetch")
    add("--sweep", choices=sweeps, help="a figure along this, and its break-even")
    add("--out", default="plans", help="folder for the figures of --sweep (default plans)")
    add("--validate", action="store_true", help="hold the planner against published measurements")
    add("--scale", action="store_true", help="7b and 70b on 8 to 4,096 GPUs")
    add_json(parser)
    options = parser.parse_args(argv)
    parser.needs("--out", "--sweep")
    check_engines(parser, options)
    check_writable("--json", options.json)
    return options


COMMANDS = {
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "articles": articles,
    "exercise": exercise,
    "check": check,
    "bug": bug,
    "compare": compare,
    "train": train,
    "memory": memory,
    "bench": bench,
    "conform": conform,
    "report": report,
    "docs": docs,
    "watch": watch,
    "plan": plan,
}


# Environment variables.


def timeout() -> float:
    """ZERO_TIMEOUT, the seconds in which all ranks must join a collective. Raises ValueError."""
    given = os.environ.get("ZERO_TIMEOUT", "120")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", given) or not 0 < float(given) <= 1e6:
        raise ValueError(f"ZERO_TIMEOUT must be a number of seconds above 0, a million at most, got {given!r}")
    return float(given)


def machines() -> int:
    """NNODES, the number of machines; the larger number of NNODES=1:2. Raises ValueError."""
    given = os.environ.get("NNODES") or "1"
    if not re.fullmatch("([0-9]+:)?[0-9]+", given):
        raise ValueError(f"NNODES must be a number of machines, as 2 or 1:2, got {given!r}")
    return int(given.rpartition(":")[2])


def check_world_size(options: argparse.Namespace, world_size: int) -> None:
    """Raise ValueError for options of `compare` and `train` that do not fit the number of ranks."""
    slow_rank = getattr(options, "slow_rank", None)
    if slow_rank and slow_rank[0] >= world_size:
        raise ValueError(f"--slow-rank {slow_rank[0]}: the ranks are 0 to {world_size - 1}")
    global_batch = getattr(options, "global_batch", world_size)
    if global_batch < world_size:
        raise ValueError(f"--global-batch {global_batch}: {world_size} rank(s) need {world_size} or more sequences")
