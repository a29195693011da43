"""The options of `./launch.sh train`."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

from zerolab.run.command_line import Parser
from zerolab.run.names import CHAPTERS
from zerolab.run.shared_options import (
    add_dtype,
    add_hardware,
    add_preset,
    add_steps,
    add_training,
    positive_int,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "train STAGE [N]",
        description="Trains a GPT on N ranks and saves checkpoints. Run the same command again to resume.",
    )
    parser.add_argument("stage", metavar="STAGE", choices=CHAPTERS, help=", ".join(CHAPTERS))
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints and losses.jsonl are written (default runs/STAGE-PRESET)"
    )
    add_preset(parser)
    add_steps(parser, 200)
    parser.add_argument(
        "--global-batch",
        type=positive_int,
        default=8,
        help="sequences per step of all ranks together (default 8)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="with muon, Muon trains the matrices of the blocks and AdamW trains the rest (default adamw)",
    )
    add_dtype(parser)
    parser.add_argument(
        "--save-every",
        type=positive_int,
        default=50,
        help="how many steps are between two checkpoints (default 50)",
    )
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="also write losses and learning rates to this folder, for TensorBoard",
    )
    add_training(parser)
    add_hardware(parser)
    options = parser.parse_args(argv)
    if options.folder is None:
        options.folder = Path(f"runs/{options.stage}-{options.preset}")
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        install = f"{shlex.quote(sys.executable)} -m pip install tensorboard"
        parser.error(f"--tensorboard needs the package tensorboard, which is not installed: {install}")
    return options
