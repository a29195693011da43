"""Ranks on GPUs: a GPU each over NCCL, or over gloo where they have to share GPUs. The fixture `on_gpus` has them."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

from zerolab.run import pool

STARTING = 600  # seconds for the ranks to import torch and to meet


class OnGpus:
    """`on_gpus(2, function, **arguments)` is `run_on_ranks` on ranks that have GPUs."""

    def __init__(self):
        self.pools = {}  # number of ranks -> its GpuPool

    def __call__(self, ranks, function, *args, **kwargs):
        if ranks not in self.pools:
            self.pools[ranks] = GpuPool(ranks)
        try:
            return self.pools[ranks].run(function, args, kwargs)
        except BaseException:
            self.pools.pop(ranks).kill()  # the others may wait in a collective
            raise

    def close(self):
        for each in self.pools.values():
            each.end()


class GpuPool(pool.Pool):
    def __init__(self, ranks):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.timeout = pool.TIMEOUT
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, ranks, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(STARTING):
                self.kill()
                raise TimeoutError(f"rank {rank} did not start within {STARTING} s")
            pipe.recv()  # None: the rank is ready. Or EOFError: it died

    def end(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(30)
        self.kill()


def serve(rank, ranks, folder, pipe):
    """A rank: call what the pipe brings, until it closes."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is not deterministic
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    backend = "nccl" if ranks <= gpus else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=pool.TIMEOUT),
        device_id=device if backend == "nccl" else None,
    )
    pipe.send(None)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            break
        torch.manual_seed(1000 + rank)  # differs between ranks: what must be equal has to be made equal
        try:
            pipe.send((function(*args, **kwargs), None))
        except BaseException:
            pipe.send((None, f"rank {rank} of {ranks}: {traceback.format_exc()}"))
    dist.barrier()  # else a rank that leaves early can abort the others
    dist.destroy_process_group()
