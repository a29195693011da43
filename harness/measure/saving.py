"""What a checkpoint costs: bytes and seconds of each rank, saved while training waits and while it goes on, and loaded.

    torchrun --standalone --nproc-per-node 2 -m harness.measure.saving [zero1|zero2|zero3] [preset]

Run it in the repository's folder. The checkpoints go to a temporary folder, and are deleted.
"""

import os
import shutil
import sys
import tempfile
import time
from functools import partial

import torch
import torch.distributed as dist

from harness.engine import checkpoint
from harness.run.model import GPT, next_token_loss, preset
from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

REPEATS = 3


def main(arguments: list[str]) -> None:
    stage, size = (*arguments, *("zero3", "tiny")[len(arguments) :])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if on_gpu else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    config = preset(size)
    model = GPT(config, seed=0).to(device)
    engine = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}[stage](model, partial(torch.optim.AdamW, lr=1e-3))
    tokens = torch.randint(config.vocab, (2, config.seq + 1), device=device)

    def steps(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            engine.training_step(tokens[:, :-1], tokens[:, 1:], next_token_loss)
        return (time.perf_counter() - began) / number

    steps(2)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    say(f"{stage}, preset {size}: {sum(p.numel() for p in model.parameters()):,} parameters")
    say(f"a step without saving: {1000 * steps(5):.0f} ms")
    for _ in range(REPEATS):
        saved = checkpoint.save(engine, folder[0])
        dist.barrier()
        print(f"save        {saved}", flush=True)
    for _ in range(REPEATS):
        future = checkpoint.async_save(engine, folder[0])
        meanwhile = steps(5)
        print(f"async_save  {future.result()}; a step meanwhile: {1000 * meanwhile:.0f} ms", flush=True)
        dist.barrier()
    began = time.perf_counter()
    checkpoint.load(engine, folder[0])
    print(f"load        rank {engine.rank}: {time.perf_counter() - began:.2f} s", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.barrier()
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
