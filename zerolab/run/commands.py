"""The options of every command, with argparse.

A function per command: it takes the words behind the command's name (default: this process's), and returns the options.
A mistake ends the process with one line and exit status 2. Imports only the standard library, so `--help` and mistakes
are answered at once, before torch is imported.
"""

import argparse
import importlib.util
import math
import os
import re
import tomllib
from pathlib import Path

from zerolab.run.command_line import Parser, did_you_mean

PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
SHAPE = ("layers", "width", "heads", "vocab")  # of a model, in place of the preset's


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
    parser.add_argument("--data", help="a file to train on (default: the Python standard library's sources)")
    parser.add_argument("--lr", type=non_negative_float, default=1e-3, help="AdamW's learning rate (default 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default 0)")


def add_hardware(parser) -> None:
    parser.add_argument("--backend", default="auto", help="auto, gloo, or the accelerator's own: nccl for CUDA")
    parser.add_argument("--device", default="auto", help="auto, cpu, or the accelerator: cuda for NVIDIA and AMD")
    parser.add_argument("--anyway", action="store_true", help="start even if there is not enough free memory")


def add_engines(parser) -> None:
    parser.add_argument("--engines", metavar="NAME,NAME", help="run only these (a wrong name lists all)")


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

    The file is opened, because permissions do not tell all, and left as it was. One process asks, and not every rank.
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
        file.write_bytes(bytes(4096))  # of an empty file a full disk has no complaint
        file.unlink()
    except OSError as error:
        where = folder.absolute()
        raise ValueError(f"cannot write to {where}: {error.strerror}. Start elsewhere, or use {instead}") from error
    if new:
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


CHAPTERS = ("zero1", "zero2", "zero3")


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
    parser.add_argument("stage", choices=CHAPTERS)
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
        parser.error("--tensorboard needs the package tensorboard, which is not installed: pip install tensorboard")
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
        "--ratios", nargs="+", metavar="FILE", help="ratios of step times, out of files of compare --json"
    )
    options = parser.parse_args(argv)
    parser.beside("--ratios")
    parser.beside("--host", "--rounds", "--json")
    shape = [f"--{name}" for name in SHAPE]
    parser.beside(
        "--sweeps", "--preset", *shape, "--rounds", "--batch", "--seq", "--backend", "--device", "--json", "--anyway"
    )
    check_seq(parser, options)
    options.shape = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    shape = PRESETS[options.preset] | options.shape
    if shape["width"] % shape["heads"]:
        parser.error(f"the width must be a multiple of the heads, got width {shape['width']}, heads {shape['heads']}")
    check_writable("--json", options.json)
    return options


def memory(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("memory [N]", description="What one rank of N holds, sends and needs, by a dry run.")
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
    parser.add_argument("--device", default="fake", help="fake: no memory is used; cuda (or xpu): real allocations")
    options = parser.parse_args(argv)
    check_seq(parser, options)
    check_batch(parser, options)
    if options.up_to and options.ranks:
        parser.error(f"--up-to {options.up_to} has ranks of its own: leave out the {options.ranks} before it")
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
        "--from", metavar="FILE", nargs="+", dest="source", help="with --figure: draw it from this, not from results/"
    )
    parser.add_argument("--out", help="the figures' folder (default results/figures of the project)")
    options = parser.parse_args(argv)
    parser.beside("--check")
    parser.needs("--from", "--figure")
    return options
