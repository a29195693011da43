"""The options of `./launch.sh train`."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

from zerolab.run.names import CHAPTERS
from zerolab.run.shared_options import (
    RANKS,
    add_dtype,
    add_hardware,
    add_preset,
    add_steps,
    existing_file,
    make_parser,
    non_negative_float,
    positive_int,
)

DESCRIPTION = f"""\
Trains a GPT with one of the ZeRO stages and saves checkpoints. It prints the
losses and, at the end, text that the model writes. If a rank crashes or hangs, all
ranks restart from the last checkpoint, at most three times. If the run still fails,
or is stopped, the same command resumes it from there. You may then change STAGE
and N.

{RANKS}"""
EXAMPLES = """\
  ./launch.sh train zero3 2
  ./launch.sh train zero2 4 --preset small --steps 1000 --folder runs/small"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("train STAGE [N]", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "stage", metavar="STAGE", choices=CHAPTERS, help=f"the stage that trains: {', '.join(CHAPTERS)}"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="the folder for the checkpoints and for losses.jsonl, which has the loss of each step "
        "(default runs/STAGE-PRESET)",
    )
    add_preset(parser)
    add_steps(parser, 200)
    parser.add_argument(
        "--global-batch",
        type=positive_int,
        default=8,
        metavar="SEQUENCES",
        help="the number of sequences in a step, on all ranks together (default 8)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="with adamw, AdamW trains all parameters; with muon, Muon trains the matrices of the transformer blocks "
        "and AdamW all other parameters (default adamw)",
    )
    add_dtype(parser)
    parser.add_argument(
        "--save-every",
        type=positive_int,
        default=50,
        metavar="STEPS",
        help="the number of steps from one checkpoint to the next (default 50)",
    )
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="also write the losses and learning rates to this folder, in the format of TensorBoard",
    )
    parser.add_argument(
        "--data",
        type=existing_file,
        metavar="FILE",
        help="the file to train on; each byte is a token (default: the source code of Python's standard library)",
    )
    parser.add_argument(
        "--lr", type=non_negative_float, default=1e-3, help="the learning rate of the optimizer (default 0.001)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the initial weights and of the batches (default 0)"
    )
    add_hardware(parser)
    options = parser.parse_args(argv)
    if options.folder is None:
        options.folder = Path(f"runs/{options.stage}-{options.preset}")
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        install = f"{shlex.quote(sys.executable)} -m pip install tensorboard"
        parser.error(f"--tensorboard needs the package tensorboard, which is not installed. Run {install}")
    return options
