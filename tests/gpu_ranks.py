"""Ranks on GPUs: a GPU each over NCCL, or over gloo where they have to share GPUs. The fixture `on_gpus` has them."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from zerolab.run import pool


class OnGpus:
    """`on_gpus(2, function, **arguments)` is `run_on_ranks` on ranks that have GPUs."""

    def __init__(self):
        self.pools = {}  # number of ranks -> its pool

    def __call__(self, ranks, function, *args, **kwargs):
        if ranks not in self.pools:
            # Not forked: a child cannot use CUDA if its parent has, and an import may do so.
            self.pools[ranks] = pool.Pool(ranks, pool.TIMEOUT, serve, start="spawn")
        try:
            return self.pools[ranks].run(function, args, kwargs)
        except BaseException:
            self.pools.pop(ranks).kill()  # the others may wait in a collective
            raise

    def close(self):
        for each in self.pools.values():
            for pipe in each.pipes:
                pipe.close()
            for process in each.processes:
                process.join(30)
            each.kill()


def serve(rank, ranks, timeout, folder, pipe):
    """The program of a rank."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is not deterministic
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
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )
    pool.answer(pipe, rank, ranks)
    dist.barrier()  # else a rank that leaves early can abort the others
    dist.destroy_process_group()
