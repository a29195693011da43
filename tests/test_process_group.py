"""How many ranks, over which backend, and on which device; and no process group at all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zerolab.engine import ZeRO3Engine, checkpoint
from zerolab.run import launch, pool, process_group
from zerolab.run.data import while_all_have
from zerolab.run.engines import CHAPTERS, STAGES


@pytest.mark.parametrize("stage", [*CHAPTERS.values(), *STAGES.values()])
def test_no_process_group(stage):
    model = torch.nn.Linear(2, 2)
    with pytest.raises((RuntimeError, ValueError), match="init_process_group"):
        stage(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    "backend, device, ranks_here, gpus, expected",
    [
        ("auto", "auto", 2, 0, ("gloo", "cpu")),
        ("auto", "auto", 2, 8, ("nccl", "cuda:1")),
        ("auto", "auto", 8, 8, ("nccl", "cuda:1")),
        ("auto", "auto", 2, 1, ("gloo", "cuda:0")),
        ("auto", "auto", 1, 1, ("nccl", "cuda:1")),
        ("gloo", "auto", 2, 2, ("gloo", "cuda:1")),
        ("auto", "cpu", 2, 8, ("gloo", "cpu")),
    ],
)
def test_backend_and_device_of_the_second_rank(backend, device, ranks_here, gpus, expected):
    assert process_group.choose(backend, device, 1, ranks_here, gpus)[:2] == expected


@pytest.mark.parametrize(
    "backend, device, ranks_here, gpus, words",
    [
        ("nccl", "auto", 2, 1, ["2 NCCL ranks", "1 GPU", "--backend gloo"]),
        ("nccl", "auto", 9, 8, ["9 NCCL ranks", "8 GPU"]),
        ("nccl", "auto", 2, 0, ["needs GPUs", "--backend gloo"]),
        ("nccl", "cpu", 2, 8, ["needs GPUs", "--device cpu"]),
        ("auto", "cuda", 2, 0, ["no GPU", "--device cpu"]),
        ("mpi", "auto", 2, 0, ["mpi", "auto, gloo or nccl"]),
        ("auto", "tpu", 2, 0, ["tpu", "auto, cpu or cuda"]),
    ],
)
def test_a_choice_that_cannot_work_raises(backend, device, ranks_here, gpus, words):
    with pytest.raises(ValueError) as raised:
        process_group.choose(backend, device, 1, ranks_here, gpus)
    assert all(word in str(raised.value) for word in words)


def test_another_kind_of_accelerator_takes_the_same_path(monkeypatch):
    """Tested only by torch's names for it. No such accelerator has run this code."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert process_group.choose("auto", "auto", 1, 4, 4)[:2] == ("xccl", "xpu:1")


def test_on_a_mac_ranks_compute_on_the_cpu(monkeypatch):
    """Gloo, the only backend there, does not send Metal's tensors. No Mac has run this test."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert process_group.count_gpus() == 0
    assert process_group.choose("auto", "auto", 1, 2, process_group.count_gpus())[:2] == ("gloo", "cpu")
    with pytest.raises(ValueError, match="--device must be auto, cpu or cuda, got 'mps'"):
        process_group.choose("auto", "mps", 0, 2, process_group.count_gpus())


@pytest.mark.parametrize(
    "backend, device, gpus, machines, ranks",
    [
        ("auto", "auto", 0, 1, 2),
        ("auto", "auto", 1, 1, 2),
        ("nccl", "auto", 1, 1, 1),
        ("auto", "auto", 1, 4, 1),
        ("auto", "auto", 8, 1, 8),
        ("auto", "cpu", 8, 1, 2),
    ],
)
def test_the_default_number_of_ranks_on_a_machine(backend, device, gpus, machines, ranks):
    assert launch.default_ranks(backend, device, gpus, machines) == ranks


def train_without_naming_a_backend(folder):
    """On a rank: in place of the usual group, one for which torch chooses the backend."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    engine = ZeRO3Engine(model, torch.optim.AdamW(model.parameters()), init_fn=lambda _, tensor: tensor.fill_(0.5))
    batches = [torch.ones(2, 3)] * (2 + rank)
    steps = 0
    for batch in while_all_have(batches):
        steps += 1
        engine.training_step(batch, torch.ones(2, 1), nn.functional.mse_loss)
    checkpoint.async_save(engine, f"{folder}/run", steps=steps).result()
    return checkpoint.load(engine, f"{folder}/run"), engine.full_state_dict()["0.weight"].device


def test_a_group_without_a_backends_name(tmp_path):
    """torch then chooses one for the machine. Builds on meta, `while_all_have` and saves depend on it."""
    own = pool.Pool(2, pool.TIMEOUT)  # no other test gets ranks with such a group
    try:
        found = own.run(train_without_naming_a_backend, (str(tmp_path),), {})
    finally:
        own.kill()
    assert found == [({"steps": 2}, torch.device("cpu"))] * 2
