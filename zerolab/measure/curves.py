"""The training runs of docs/train.md: a GPT under DDP and the three stages, one killed and resumed, one with Muon.

    .venv/bin/python -m zerolab.measure.curves runs/curves --json results/curves-cpu-2ranks.json

It runs the commands of `runs` one after the other, each with the same options. Every run has a folder in runs/curves,
which must not exist yet, because runs of older code would be reported as runs of this code.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zerolab.run import engines, journal, json_file, process_group, ranks, train, train_options
from zerolab.run.data import load_text
from zerolab.run.model import preset

RANKS = 2
SAVES = 12  # checkpoints of a run
KILLED_AFTER = 0.55  # of the steps, which is some steps after a checkpoint


class UnderDDP(train.Training):
    """The same loop under DDP, which `train` does not have. It saves nothing."""

    def build_engine(self, model):
        (optimizer,), _ = train.make_optimizers(model, self.options, self.world.device)
        engine = engines.build("ddp", model, optimizer, self.world.device)
        engine.clip_grad_norm_ = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
        return engine

    def save(self) -> None:
        pass

    def load(self) -> None:
        pass


def train_under_ddp() -> None:
    """What each rank of the DDP run does. The command line is train's, with zero1 in the place of the stage."""
    options = train_options.arguments()
    world = process_group.start(options.backend, options.device)
    options.folder.mkdir(parents=True, exist_ok=True)
    UnderDDP(options, world, load_text(options.data, preset(options.preset).seq)).run(lambda: False)
    process_group.stop()


def runs(options: list[str]) -> dict[str, list[list[str]]]:
    """{name: its commands}. If there are two, the first one is killed, and the second one continues."""
    stage = {name: ["./launch.sh", "train", name, str(RANKS), *options] for name in ("zero1", "zero2", "zero3")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return {
        "DDP": [[*torchrun, "-m", "zerolab.measure.curves", "zero1", *options]],
        "ZeRO-1": [stage["zero1"]],
        "ZeRO-2": [stage["zero2"]],
        "ZeRO-3, killed, then ZeRO-2": [stage["zero3"], stage["zero2"]],
        "ZeRO-2, Muon": [[*stage["zero2"], "--optimizer", "muon"]],
    }


def run(name: str, commands: list[list[str]], folder: Path, steps: int) -> dict:
    """Run the commands, and return what they have written: losses, evaluations, and the continued text."""
    folder.mkdir(parents=True)
    log = folder / "output.txt"
    for number, command in enumerate(commands, 1):
        print(f"{name}: {' '.join(command[-12:])}", flush=True)
        is_last = number == len(commands)
        line, variables = [*command, "--folder", str(folder)], ranks.environment(PYTHON=sys.executable)
        with log.open("a") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            # Whatever still runs when the block is left is killed, without a chance to save.
            with ranks.started(line, by=signal.SIGKILL, cwd=ranks.ROOT, env=variables, **streams) as process:
                while process.poll() is None and (is_last or len(journal.read(folder)) < KILLED_AFTER * steps):
                    time.sleep(0.2)
                status = process.poll()
        if status != (0 if is_last else None):
            raise RuntimeError(f"{name} ended with status {status}: see {log}")
    lines = journal.read(folder)
    text = log.read_text()
    return {
        "commands": [" ".join(command).replace(sys.executable, "python") for command in commands],
        "losses": [line["loss"] for line in lines],
        "evaluation": {line["step"]: line["evaluation_loss"] for line in lines if "evaluation_loss" in line},
        "continued": [int(step) for step in re.findall(r"continuing after step (\d+)", text)],
        "text": re.findall(r"After (b['\"].*['\"]) the model writes (b['\"].*['\"])\.", text)[-1],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m zerolab.measure.curves",
        description="Trains the same GPT in five runs, under DDP and the three stages, and collects their losses.",
    )
    parser.add_argument("folder", type=Path, help="a new folder, in which each run gets a folder")
    parser.add_argument("--preset", default="tiny", help="the size of the GPT (default tiny)")
    parser.add_argument("--steps", type=int, default=400, help="the number of training steps of a run (default 400)")
    parser.add_argument("--json", type=Path, help="also write the losses to this file, as JSON")
    options = parser.parse_args(argv)
    if options.folder.exists():
        parser.error(f"{options.folder} exists: pass a new folder, because runs of older code would be reported")
    train_with = [
        "--preset",
        options.preset,
        "--steps",
        str(options.steps),
        "--save-every",
        str(options.steps // SAVES),
    ]
    results = json_file.about(torch.device("cpu")) | {"ranks": RANKS, "runs": {}}
    results |= {"preset": options.preset, "steps": options.steps}
    results["command"] = f"python -m zerolab.measure.curves {' '.join(map(str, sys.argv[1:]))}"
    for name, commands in runs(train_with).items():
        folder = options.folder.resolve() / re.sub(r"\W+", "-", name.lower())
        results["runs"][name] = run(name, commands, folder, options.steps)
        json_file.write(options.json, results, whole=False)
    json_file.write(options.json, results)


if __name__ == "__main__":
    if "RANK" in os.environ:
        process_group.run(train_under_ddp)
    else:
        main()
