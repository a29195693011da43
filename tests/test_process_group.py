"""How many ranks, over which backend, and on which device; and no process group at all."""

import pytest
import torch
from tables import TABLES

from zerolab.run import process_group
from zerolab.run.engines import CHAPTERS, STAGES


@pytest.mark.parametrize("stage", [*CHAPTERS.values(), *STAGES.values()])
def test_no_process_group(stage):
    model = torch.nn.Linear(2, 2)
    with pytest.raises((RuntimeError, ValueError), match="init_process_group"):
        stage(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("given, expected", TABLES["choices"].items())
def test_choice_of_backend_and_device(given, expected):
    backend, device, ranks_here, gpus = given.split()
    if isinstance(expected, str):
        assert " ".join(process_group.choose(backend, device, 1, int(ranks_here), int(gpus))[:2]) == expected
    else:
        with pytest.raises(ValueError) as raised:
            process_group.choose(backend, device, 1, int(ranks_here), int(gpus))
        assert all(words in str(raised.value) for words in expected)


def test_another_kind_of_accelerator_takes_the_same_path(monkeypatch):
    """Of torch's names for it alone: none was seen at work."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert process_group.choose("auto", "auto", 1, 4, 4)[:2] == ("xccl", "xpu:1")
    assert process_group.choose("gloo", "xpu", 1, 4, 4)[:2] == ("gloo", "xpu:1")
    for backend, device, words in (("nccl", "auto", "auto, gloo or xccl"), ("auto", "cuda", "auto, cpu or xpu")):
        with pytest.raises(ValueError, match=words):
            process_group.choose(backend, device, 0, 4, 4)


def test_the_reason_says_whether_ranks_share_a_gpu():
    for ranks, gpus, shared in ((2, 1, True), (5, 4, True), (2, 2, False), (2, 4, False)):
        why = process_group.choose("gloo", "auto", 0, ranks, gpus)[2]
        assert ("share" in why) == shared and str(ranks) in why and str(gpus) in why and "slow" in why, why


def test_tf32_is_what_torch_says():
    """Also what a container has set, by a variable that torch reads when it is imported."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        products.fp32_precision = "ieee"
        assert not process_group.tf32()
        products.fp32_precision = "tf32"
        assert process_group.tf32()
    finally:
        products.fp32_precision = before


@pytest.mark.parametrize("given, ranks", TABLES["ranks"].items())
def test_how_many_ranks_when_nobody_says(given, ranks):
    backend, device, gpus, machines = given.split()
    assert process_group.default_ranks(backend, device, int(gpus), int(machines)) == ranks
