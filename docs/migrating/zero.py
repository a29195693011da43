"""A training script with ZeRO-2: two micro-batches a step, clipping, a schedule, evaluation, resuming.

    torchrun --nproc-per-node 2 zero.py 4     trains to the end of epoch 4, from the end of the last run

ddp.py is the same script with DistributedDataParallel, and move.py moves a run from that script to this one.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from zerolab.engine import ZeRO2Engine, checkpoint

SAVED = "run"  # a folder
ALL_EPOCHS = 8
MICRO_BATCHES = 2  # in a step


def make_data(seed, samples):
    inputs = torch.randn(samples, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def make_optimizer(model):
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], lr=0.01)


@torch.no_grad()
def evaluate(model, loader):
    """The mean loss over the batches of all ranks."""
    model.eval()
    losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in loader]
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main(last_epoch):
    dist.init_process_group("gloo")
    data, unseen = make_data(1, 512), make_data(2, 64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    unseen_loader = DataLoader(unseen, 16, sampler=DistributedSampler(unseen, shuffle=False))

    model = make_model()
    optimizer = make_optimizer(model)
    steps = ALL_EPOCHS * len(loader) // MICRO_BATCHES
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    engine = ZeRO2Engine(model, optimizer)
    first_epoch = 0
    if checkpoint.complete(SAVED):
        saved = checkpoint.load(engine, SAVED)
        schedule.load_state_dict(saved["schedule"])
        first_epoch = saved["epoch"]

    for epoch in range(first_epoch, last_epoch):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader, 1):
            last = number % MICRO_BATCHES == 0
            with contextlib.nullcontext() if last else engine.no_sync():
                loss = nn.functional.mse_loss(engine(inputs), targets) / MICRO_BATCHES
                loss.backward()
            if last:
                engine.clip_grad_norm_(1.0)
                engine.step()
                schedule.step()
                engine.zero_grad()
        mean = evaluate(engine, unseen_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: lr {schedule.get_last_lr()[0]:.6f}, loss {mean:.6f}")
        checkpoint.save(engine, SAVED, schedule=schedule.state_dict(), epoch=epoch + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
