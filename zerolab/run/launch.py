"""The program behind ./launch.sh: it reads a command's options, sets up the environment, and starts the command.

A command that needs ranks is started by torchrun.py, in the way in which torchrun would start the command line that is
printed. This module imports only the standard library, so that `--help` and mistakes are answered before anything is
installed and before torch is imported.
"""

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from zerolab.run import enough_memory, folder_lock, names
from zerolab.run.command_line import did_you_mean, one_line
from zerolab.run.parent import end_with_parent
from zerolab.run.shared_options import check_world_size, machines, timeout

ROOT = Path(__file__).resolve().parents[2]

USAGE = """\
./launch.sh COMMAND --help lists the options of a command, with examples.

Learn
./launch.sh zero1|zero2|zero3 [N]  trains with one ZeRO stage, and prints a step
                                   event by event
./launch.sh articles               tests the claims of five articles
./launch.sh notebooks              opens the notebooks in JupyterLab
./launch.sh exercise NAME          writes an exercise to exercises/NAME.py
./launch.sh check NAME [N]         tests your exercise; with --hint prints a hint
./launch.sh bug [NUMBER [N]]       lists the bugs of the museum, or runs one

Run and measure
./launch.sh compare [N]            compares DDP, our ZeRO stages and FSDP2
./launch.sh train STAGE [N]        trains a GPT, and resumes after a crash or a hang
./launch.sh memory [N]             predicts the memory and traffic of a training
                                   step without a GPU; the default model has 7
                                   billion parameters
./launch.sh bench [N]              measures the time and memory that options cost
./launch.sh conform [ENGINE|FILE.py ...] [N]
                                   runs the conformance tests on engines
./launch.sh report [FOLDER]        runs the main measurements on this machine, and
                                   writes a report
./launch.sh docs                   writes the tables and figures of README.md and
                                   docs/
./launch.sh test                   runs the tests; accepts the options of pytest
./launch.sh help                   prints this text

Extras
./launch.sh watch [ENGINE] [N]     records a step, and writes a page that plays
                                   it in a browser
./launch.sh plan [N]               predicts step times on other machines
./launch.sh test --simulated-gpus N
                                   runs the tests that need GPUs on N simulated
                                   GPUs

Without a command, ./launch.sh runs compare. N is the number of ranks, which are
the processes that train together. Without N, compare, train, bench and the stages
start one rank per GPU, or two if the machine has fewer than two GPUs. An engine is
anything that trains a model, such as DDP or one of the stages.
Relative paths start from the current folder.

Environment variables
PYTHON           the Python that runs the command. If it is set, nothing is
                 installed. Otherwise the first command installs torch into .venv
OMP_NUM_THREADS  the number of threads of each rank (default 1)
ZERO_TIMEOUT     the seconds that a rank waits in a collective for the other ranks
                 (default 120)
NNODES           the number of machines that train together (default 1). With more
                 than one, N is the number of ranks on each machine
NODE_RANK        the index of this machine, 0 to NNODES - 1 (train does not need it)
RDZV_ENDPOINT    host:port of the machine with index 0, to which the others connect"""


@dataclass(frozen=True)
class Command:
    """How a command is started: Python runs `module` with the words `first` and the user's options.

    `options` is the module that reads the options, without importing torch. If `ranked`, torchrun starts the ranks.
    """

    module: str
    options: str
    first: tuple[str, ...] = ()
    ranked: bool = False


COMMANDS = {
    "zero1": Command("zerolab.measure.walkthrough", "zerolab.measure.walkthrough_options", ("zero1",), ranked=True),
    "zero2": Command("zerolab.measure.walkthrough", "zerolab.measure.walkthrough_options", ("zero2",), ranked=True),
    "zero3": Command("zerolab.measure.walkthrough", "zerolab.measure.walkthrough_options", ("zero3",), ranked=True),
    "compare": Command("fsdp2_compare", "zerolab.measure.referee_options", ranked=True),
    "train": Command("zerolab.run.train", "zerolab.run.train_options", ranked=True),
    "bench": Command("zerolab.measure.bench", "zerolab.measure.bench_options", ranked=True),
    "articles": Command("zerolab.teach.articles", "zerolab.teach.articles_options"),
    "exercise": Command("zerolab.teach.exercise", "zerolab.teach.exercise_options"),
    "check": Command("zerolab.teach.check", "zerolab.teach.check_options"),
    "bug": Command("zerolab.teach.museum", "zerolab.teach.museum_options"),
    "memory": Command("zerolab.measure.memory", "zerolab.measure.memory_options"),
    "conform": Command("tests.conformance.command", "tests.conformance.conform_options"),
    "report": Command("zerolab.measure.report", "zerolab.measure.report_options"),
    "docs": Command("zerolab.teach.docs", "zerolab.teach.docs_options"),
    "watch": Command("extra.watch", "extra.watch.watch_options"),
    "plan": Command("extra.planner", "extra.planner.plan_options"),
}
OTHERS = ["notebooks", "test", "help"]  # main() starts them itself
PYTEST = ["test", "conform", "check"]  # commands that run pytest
DEFAULT = """\
Without a command, ./launch.sh runs compare: it trains a small GPT with DDP, our ZeRO stages and FSDP2, and compares
their losses, memory and step times. This takes two minutes on two CPU cores, and ./launch.sh compare --quick takes less
than one. To stop it, press Ctrl-C. ./launch.sh help lists all commands."""
CPU_BUILDS = """\
The usual build of torch includes NVIDIA's libraries, 5 GB in all. If you have no NVIDIA GPU, you can save 3.5 GB: press
Ctrl-C, set PIP_EXTRA_INDEX_URL to the address of torch's builds for CPUs, and start again. PyTorch's page "Get Started"
shows this address after --index-url. If you already have torch, PYTHON=python3 uses it and installs nothing."""

# Ranks that are asked to stop get the same signal, and may take their time to save. A machine that is gone is missed
# after ten seconds. New ranks get a new store, because the old one still has the old ranks' keys.
TRAIN = [
    *("--max-restarts", "3", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT"),
    *("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10"),
]
TRAIN_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}


# Reading the command line.


def check_command(command: str) -> None:
    known = [*COMMANDS, *OTHERS]
    if command not in known:
        raise ValueError(f"no command {command!r}{did_you_mean(command, known)} Use one of: {', '.join(known)}")


def take_ranks(command: str, words: list[str]) -> int | None:
    """Remove the number of ranks from the `words` behind the command, and return it. None if there is none."""
    place = 1 if command == "train" else 0  # a stage comes first
    if len(words) <= place or words[place].startswith("-"):
        return None
    given = words.pop(place)
    if not re.fullmatch("[1-9][0-9]{0,2}", given):
        raise ValueError(f"N must be a number of ranks, 1 to 999, got {given!r}")
    return int(given)


def read_options(command: str, words: list[str]) -> argparse.Namespace:
    program = COMMANDS[command]
    return importlib.import_module(program.options).arguments([*program.first, *words])


def check_variables(command: str) -> None:
    timeout()
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", threads):
        raise ValueError(f"OMP_NUM_THREADS must be a number of threads per rank, 1 or more, got {threads!r}")
    nodes = os.environ.get("NNODES") or "1"
    if nodes == "1":
        return
    endpoint = os.environ.get("RDZV_ENDPOINT", "")
    if not re.fullmatch(".+:[0-9]+", endpoint):
        raise ValueError(f"NNODES={nodes} needs RDZV_ENDPOINT=host:port, the address of one machine that all can reach")
    if command == "train":
        return
    node = os.environ.get("NODE_RANK", "")
    if not node.isdecimal() or int(node) >= machines():
        raise ValueError(
            f"NNODES={nodes} needs NODE_RANK, a different number on each machine, starting with 0, got {node!r}"
        )


def count_gpus() -> int:
    """How many NVIDIA GPUs a rank will see. It is counted without torch, which takes seconds to import."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall("^GPU ", listed, re.MULTILINE))


def default_ranks(backend: str, device: str, gpus: int, machines: int) -> int:
    """How many ranks a machine starts without N: one per GPU, but two if that would be a single rank over gloo."""
    if gpus == 0 or device == "cpu":
        return 2
    return gpus if gpus > 1 or machines > 1 or backend not in ("auto", "gloo") else 2


def check_job(command: str, options, ranks: int, gpus: int) -> None:
    """Raise ValueError if the options do not allow this number of ranks on this machine."""
    world_size = ranks * machines()
    check_world_size(options, world_size)
    if command == "train":
        engines = [options.stage]
        if machines() == 1:  # on several, another machine may have begun this run
            folder_lock.check_folder(options.folder, options.preset)
    elif command in names.CHAPTERS:
        engines = [command]
    elif command == "bench":
        engines = names.CHAPTERS
    else:
        engines = options.engines.split(",") if options.engines else names.engines_of(command)
    if gpus == 0 or options.device == "cpu":
        enough_memory.refuse_too_large(options, engines, ranks, world_size)


# The environment: the user's, or .venv.


def environment(command: str) -> str:
    """The path of a Python that has torch: PYTHON, or the one in .venv, which is created once."""
    if os.environ.get("PYTHON"):
        check_packages(["pytest"] if command in PYTEST else [])
        return sys.executable
    python = ROOT / ".venv" / "bin" / "python"
    installed = ROOT / ".venv" / "installed"
    requirements = ROOT / "requirements.txt"
    wanted = subprocess.run(["cksum"], stdin=requirements.open(), capture_output=True, text=True).stdout
    if not installed.exists() or installed.read_text() != wanted:
        install(python, requirements)
        installed.write_text(wanted)  # last: an interrupted installation is started over
    return str(python)


def check_packages(more: list[str]) -> None:
    """Raise ValueError if this Python lacks a package of pyproject.toml, or one of `more`. Imports none of them."""
    import importlib.metadata  # slow to import, and needed only here
    import tomllib

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    missing = []
    for package in [*wanted, *more]:
        name, _, least = package.partition(">=")
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append((package, name))
            continue
        if least and numbers(version) < numbers(least):
            missing.append((package, f"{name} {least} or newer (it has {version})"))
    if missing:
        packages = shlex.join(package for package, _ in missing)
        raise ValueError(
            f"PYTHON={os.environ['PYTHON']} has no {', '.join(what for _, what in missing)}. Install what is missing: "
            f"{shlex.quote(sys.executable)} -m pip install {packages}  Or unset PYTHON, so that .venv is "
            f"created with all packages."
        )


def numbers(version: str) -> list[int]:
    """[2, 11] from "2.11.0+cpu"."""
    return [int(part) for part in re.findall("[0-9]+", version)[:2]]


def install(python: Path, requirements: Path) -> None:
    folder = python.parents[1]
    if not os.access(folder if folder.exists() else ROOT, os.W_OK):
        raise ValueError(
            f"cannot write {folder}, where packages would be installed. Set PYTHON to a Python that has torch, or "
            "clone the project into a folder that you can write to"
        )
    log = folder / "pip.log"
    print(f"creating {folder}, once, with the packages of requirements.txt: torch, Jupyter and some small ones")
    if sys.platform == "linux" and not os.environ.get("PIP_INDEX_URL") and not os.environ.get("PIP_EXTRA_INDEX_URL"):
        print(CPU_BUILDS)
    sys.stdout.flush()
    if not python.exists() and subprocess.run([sys.executable, "-m", "venv", str(folder)]).returncode:
        raise ValueError("python3 -m venv failed, see above (on Debian and Ubuntu: apt install python3-venv)")
    print(f"installing, which takes minutes; pip writes its messages to {log}", flush=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-r", str(requirements)]
    # Quiet, so that the advice above stays on the screen while there is time to follow it.
    if subprocess.run([*pip, "--quiet", "--log", str(log)]).returncode:
        raise ValueError(f"the installation failed, see above and {log}. The same command tries again")


# What is started.


def torchrun_options(command: str, ranks: int) -> list[str]:
    nodes = os.environ.get("NNODES") or "1"
    if nodes == "1":
        options = ["--standalone"]
    elif command == "train":
        options = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", "train"]
        options += ["--rdzv-endpoint", os.environ["RDZV_ENDPOINT"]]
    else:
        options = ["--nnodes", nodes, "--node-rank", os.environ["NODE_RANK"], "--rdzv-backend", "static"]
        options += ["--rdzv-endpoint", os.environ["RDZV_ENDPOINT"]]
    if command == "train":
        options += TRAIN
    return [*options, "--nproc-per-node", str(ranks)]


def start(line: list[str]) -> int:
    """Run zerolab/run/torchrun.py to its end, and return the exit status. A signal to this process is passed on.

    It has its own session, so that Ctrl-C reaches it once: from here. After kill -9 of this process the kernel sends
    it SIGTERM, and it ends its ranks.
    """
    received = []
    with subprocess.Popen(line, start_new_session=True, preexec_fn=end_with_parent) as process:

        def pass_on(number, frame):
            received.append(number)
            # Ranks that still import torch, or wait in C++, end at once by SIGTERM. By SIGINT they would print a
            # traceback each, or lose it. `train` saves after either.
            process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, pass_on)
        status = process.wait()
    if received:
        name = "Ctrl-C" if received[0] == signal.SIGINT else signal.Signals(received[0]).name
        print(f"\nstopped by {name}", file=sys.stderr)
        return 128 + received[0]
    return status if status >= 0 else 128 - status


def replace_by(python: str, *words: str) -> None:
    """Continue this process as `python WORDS...`."""
    sys.stdout.flush()
    os.execv(python, [python, *words])


def test(python: str, words: list[str]) -> None:
    if words[:1] == ["--simulated-gpus"]:
        replace_by(python, "-m", "extra.simulated_gpu.run", *words[1:])
    os.chdir(ROOT)  # tests are named by their place in the project
    has_xdist = not os.environ.get("PYTHON") or importlib.util.find_spec("xdist")
    if has_xdist and words in ([], ["-m", "long"], ["-m", "thorough"]):
        words = [*words, "-n", "2", "--dist", "loadfile"]  # all of them: two at a time, because many wait for ranks
    print("+ python -m pytest", shlex.join(words))
    replace_by(python, "-m", "pytest", *words)


def has_jupyter(python: str) -> bool:
    looks = [python, "-c", "import jupyterlab, ipykernel"]
    return subprocess.run(looks, capture_output=True).returncode == 0


def notebooks(python: str, words: list[str]) -> None:
    if not has_jupyter(python):
        raise ValueError(f"this Python has no Jupyter. Install it: {python} -m pip install jupyter")
    if os.getuid() == 0:  # as in most containers; Jupyter asks for it
        words = ["--allow-root", *words]
    replace_by(python, "-m", "jupyterlab", f"--notebook-dir={ROOT / 'notebooks'}", *words)


@one_line(ValueError, OSError)
def main(argv: list[str]) -> int:
    if not argv:
        print(DEFAULT, flush=True)
    command, *words = argv or ["compare"]
    if command in ("help", "-h", "--help"):
        print(USAGE)
        return 0
    check_command(command)
    if command == "notebooks":
        notebooks(environment(command), words)
    if command == "test":
        test(environment(command), words)
    program = COMMANDS[command]
    ranks = take_ranks(command, words) if program.ranked else None
    options = read_options(command, words)
    check_variables(command)
    if not program.ranked or (command == "bench" and options.host):
        replace_by(environment(command), "-m", program.module, *program.first, *words)
    gpus = count_gpus()
    if ranks is None:
        ranks = default_ranks(options.backend, options.device, gpus, machines())
    check_job(command, options, ranks, gpus)
    python = environment(command)
    line = [*torchrun_options(command, ranks), "-m", program.module, *program.first, *words]
    variables = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
    if command == "train":
        variables |= TRAIN_VARIABLES
    if Path.cwd() != ROOT:
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    os.environ.update(variables)
    set_before = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    print("+", *set_before, "torchrun", shlex.join(line), flush=True)
    return start([python, "-m", "zerolab.run.torchrun", *line])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
