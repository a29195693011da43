"""Starting and stopping the ranks: device, backend, timeout, and readable errors."""

import itertools
import json
import os
import platform
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from zerolab.engine import accelerator
from zerolab.run.command_line import ERRORS_ARE_COLLECTED, error_line, one_line
from zerolab.run.parent import end_with_parent
from zerolab.run.shared_options import timeout


@dataclass(frozen=True)
class World:
    """The job as one of its ranks sees it: its rank, the number of ranks, its device, the backend and why that one."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    why: str

    def print(self, *values) -> None:
        """Print on rank 0 only, at once."""
        if self.rank == 0:
            print(*values, flush=True)


def count_gpus() -> int:
    """How many accelerators ranks can use. 0 on a Mac: no backend of torch.distributed sends Metal's tensors."""
    return accelerator.count() if dist.get_default_backend_for_device(accelerator.kind()) != "gloo" else 0


def choose(backend: str, device: str, local_rank: int, ranks_here: int, gpus: int) -> tuple[str, str, str]:
    """(backend, device, why) for `ranks_here` ranks on a machine with `gpus` GPUs; "auto" leaves the choice to us.

    Raises ValueError for a combination that cannot work.
    """
    kind = accelerator.kind() if count_gpus() else "cuda"
    own = dist.get_default_backend_for_device(kind)  # between GPUs: "nccl" for CUDA, "xccl" for XPU
    if device not in ("auto", "cpu", kind):
        raise ValueError(f"--device must be auto, cpu or {kind}, got {device!r}")
    if backend not in ("auto", "gloo", own):
        raise ValueError(f"--backend must be auto, gloo or {own}, got {backend!r}")
    if device == kind and gpus == 0:
        raise ValueError(f"--device {kind}, but torch sees no GPU here: use --device cpu")
    if backend == own:
        if device == "cpu" or gpus == 0:
            raise ValueError(f"--backend {own} needs GPUs, found {gpus} (and --device {device}): use --backend gloo")
        if ranks_here > gpus:
            raise ValueError(
                f"{ranks_here} {own.upper()} ranks on a machine with {gpus} GPU(s): {own.upper()} needs one GPU per "
                f"rank (else NCCL raises 'Duplicate GPU detected'). Start {gpus} rank(s), or use --backend gloo"
            )
    if device == "cpu" or gpus == 0:
        return "gloo", "cpu", "no GPU is used" if gpus else "torch sees no GPU"
    if backend == own or (backend == "auto" and ranks_here <= gpus):
        return own, f"{kind}:{local_rank}", f"one of {gpus} GPU(s) for each of {ranks_here} rank(s)"
    alone = f"one of {gpus} GPU(s) for each of {ranks_here} rank(s), without {own.upper()} as --backend gloo asks"
    why = f"{ranks_here} ranks share {gpus} GPU(s), which {own.upper()} refuses" if ranks_here > gpus else alone
    return "gloo", f"{kind}:{local_rank % gpus}", f"{why}; gloo goes through host memory: correct but slow"


def start(backend: str = "auto", device: str = "auto") -> World:
    """Join the process group that torchrun has described in the environment.

    Raises RuntimeError outside torchrun, ValueError for a backend or device that cannot work here.
    """
    if "RANK" not in os.environ:
        raise RuntimeError("started without torchrun. ./launch.sh help lists the commands, which start it")
    end_with_parent(signal.SIGKILL)
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    backend, device, why = choose(backend, device, local_rank, ranks_here, count_gpus())
    chosen = torch.device(device)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index)  # before anything else touches a GPU
    else:
        # torch itself asks the first GPU that it sees, in every optimizer's step for example. That takes memory there.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Nothing waits forever: a rank that never comes is an error on the others after this time.
    own = chosen if backend != "gloo" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout()), device_id=own)
    return World(dist.get_rank(), dist.get_world_size(), chosen, backend, why)


def hardware(device: torch.device) -> str:
    """The name of what was measured on: the GPU with the version of CUDA, or the processor and its cores."""
    if device.type != "cpu":
        version = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"torch's {device.type}"
        return f"{torch.get_device_module(device).get_device_name(device)}, {version}"
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), name)
    return f"{os.cpu_count()} cores of {name}"


def largest(values: list[float], world: World) -> list[float]:
    """The maximum over the ranks of each value. A collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def gathered(value) -> list:
    """The `value` of each rank. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


_works_alone = itertools.count()  # of `wait_for_rank_0`; the same number on all ranks


def wait_for_rank_0(world: World) -> None:
    """The other ranks wait here until rank 0 has come, for as long as that takes. All ranks call it.

    For work that only rank 0 does. A collective would not work: after ZERO_TIMEOUT seconds it ends the ranks that wait.
    Here they ask the store, again and again. If rank 0 dies, torchrun ends them, or the store does not answer.
    """
    # torch has no public function for the store that the ranks met at.
    store, key = dist.distributed_c10d._get_default_store(), f"rank 0 worked alone/{next(_works_alone)}"
    if world.rank == 0:
        store.set(key, "done")
    while world.rank != 0 and not store.check([key]):  # no `wait`: others in this process may need the store
        time.sleep(0.05)


def stop() -> None:
    """Leave together: a rank that leaves first can make the others abort."""
    dist.barrier()
    if dist.get_backend() != "gloo":  # whose destructor may abort when another rank has gone: `run` goes without
        dist.destroy_process_group()


MISTAKES = (ValueError, TypeError, OSError)  # the user's: one line is enough, and exit status 2


class ErrorFile(ErrorHandler):
    """Writes this rank's error to the file that torch's agent reads: torchrun.py here, or torchrun's table."""

    def record_exception(self, error: BaseException) -> None:
        self.record(message(error), waited_in_vain(error))

    def record(self, text: str, lost: bool = False) -> None:
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file is None:  # no agent has started this process
            return
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "lost": lost}
        with open(file, "w") as opened:
            json.dump({"message": {"message": text, "extraInfo": extra}}, opened)


def run(main) -> None:
    """Call `main()` and end the process. An exception becomes one readable message and exit status 1 or 2.

    The other ranks do not wait for this one: the launcher stops them when it exits.
    """
    status, error_file = 0, ErrorFile()
    try:
        record(one_line()(main), error_file)()
    except SystemExit as leaving:
        status = leaving.code or 0
        if status:
            error_file.record("")  # `main` has printed why
    except Exception as error:
        status = 2 if isinstance(error, MISTAKES) else 1
        print_error(error)
    sys.stderr.flush()
    os._exit(status)  # no destructors: gloo's may abort or wait for ranks that have gone


def message(error: BaseException) -> str:
    """What is printed of an exception: one line, or the traceback if the exception is unexpected."""
    if isinstance(error, (*MISTAKES, RuntimeError)):
        return error_line(error)
    return "".join(traceback.format_exception(error))


def print_error(error: BaseException) -> None:
    """On a rank whose launcher does not collect the errors: under plain torchrun, or if ranks are restarted."""
    if ERRORS_ARE_COLLECTED in os.environ:
        return
    # Before the ranks meet all of them find the same mistake: one of them prints it.
    if isinstance(error, MISTAKES) and not dist.is_initialized() and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    hint = (
        "Another rank has failed or hangs: look for the first error of another rank.\n" if waited_in_vain(error) else ""
    )
    print(message(error), hint, sep="", end="", file=sys.stderr)


def waited_in_vain(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and lost(str(error))


def lost(text: str) -> bool:
    """Whether an error's message comes from a rank that waited for another rank in vain."""
    signs = "waited in vain", "imed out", "timeout", "onnection closed", "onnection reset", "pair closure", "peer"
    return any(sign in text for sign in signs)
