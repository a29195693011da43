"""The peak rates of GPUs, and the rates that follow from them; and what a dry run on a GPU keeps when it is ended."""

import json

import pytest

from harness.measure import gpus
from harness.run.model import preset


@pytest.mark.parametrize(
    "name, bf16, fp32",
    (
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("Tesla T4", None, 8.1e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        # Near to a known one by name, and another model: there is no rate for it.
        ("NVIDIA L40S", None, None),
        ("NVIDIA L40", None, None),
        ("NVIDIA T400 4GB", None, None),
        ("NVIDIA GeForce RTX 3090 Ti", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA GeForce RTX 4090 SUPER", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA H100 80GB HBM2e", None, None),
        ("NVIDIA GH200 480GB", None, None),
        ("GRID A100-40C", None, None),
        ("", None, None),
        ("NVIDIA GeForce GTX 1080", None, None),
    ),
)
def test_peak_rates(name, bf16, fp32):
    assert (gpus.peak_flops(name, "bf16"), gpus.peak_flops(name, "fp32")) == (bf16, fp32)


def test_flops_per_token_are_those_that_torch_counts():
    """Against torch's own counter over forward and backward, which leaves out what is no matrix product."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from harness.run.model import GPT, next_token_loss

    config = preset("toy")
    model, tokens = GPT(config), torch.zeros(2, config.seq + 1, dtype=torch.int64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    parameters = sum(param.numel() for param in model.parameters())
    ours = gpus.flops_per_token(config, parameters, config.seq) * 2 * config.seq
    assert counted.get_total_flops() == pytest.approx(ours, rel=0.03)  # biases and norms are no matrix products


@pytest.mark.parametrize(
    "name, ranks, gpus_here, divided_by", (("ddp", 2, 1, 1), ("ddp", 8, 8, 8), ("single", 8, 8, 1))
)
def test_mfu_is_of_the_gpus_in_use(name, ranks, gpus_here, divided_by, monkeypatch):
    import torch

    import fsdp2_compare as referee

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus_here)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    options = referee.arguments(["--preset", "small", "--dtype", "bf16"])
    me = referee.Rank(0, ranks, torch.device("cuda", 0), "nccl", "")
    found = referee.Referee(options, torch.zeros(1000, dtype=torch.uint8), me).rates(name, 1e6)
    flops = 6 * (85_645_824 - 512 * 768) + 12 * 12 * 768 * 512
    assert found["mfu"] == pytest.approx(flops * 1e6 / (989e12 * divided_by), abs=1e-4)
    working = 1 if name == "single" else ranks
    assert found["tokens_per_s_per_rank"] == round(1e6 / working, 1)
    assert found["flops_per_s_per_rank"] == pytest.approx(flops * 1e6 / working)


def test_a_dry_run_keeps_what_it_has_after_each_engine():
    from harness.measure import memory

    kept = []
    options = memory.arguments(["--preset", "toy", "--ranks", "2", "--engines", "zero1,zero3"])
    last = memory.measure_all(options, keep=lambda found: kept.append(json.loads(json.dumps(found))))
    assert [list(found["engines"]) for found in kept] == [["zero1"], ["zero1", "zero3"]]
    assert kept[-1] == json.loads(json.dumps(last))
