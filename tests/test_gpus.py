"""The peak rates of GPUs, and the rates that follow from them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from zerolab.measure import gpus
from zerolab.run.model import GPT, next_token_loss, number_of_parameters, preset


@pytest.mark.parametrize(
    "name, bf16, fp32",
    [
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("Tesla T4", None, 8.1),
        ("NVIDIA A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA H200 NVL", 835, 60),
        ("NVIDIA GeForce RTX 3090", 71, 35.6),
        ("NVIDIA L4", 121, 30.3),
    ],
)
def test_peak_rates_by_the_name_that_torch_gives(name, bf16, fp32):
    assert gpus.peak_flops(name, "bf16") == (bf16 and bf16 * 1e12)
    assert gpus.peak_flops(name, "fp32") == fp32 * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40S",
        "NVIDIA L40",
        "NVIDIA T400 4GB",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 SUPER",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA GH200 480GB",
        "GRID A100-40C",
        "NVIDIA GeForce GTX 1080",
        "",
    ],
)
def test_a_model_with_a_similar_name_has_no_known_rate(name):
    assert gpus.peak_flops(name, "bf16") is None and gpus.peak_flops(name, "fp32") is None


def test_flops_per_token_are_those_that_torch_counts():
    """Against torch's own counter over forward and backward, which leaves out what is no matrix product."""
    config = preset("toy")
    model, tokens = GPT(config), torch.zeros(2, config.seq + 1, dtype=torch.int64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    ours = gpus.flops_per_token(config, number_of_parameters(config), config.seq) * 2 * config.seq
    assert counted.get_total_flops() == pytest.approx(ours, rel=0.03)  # biases and norms are no matrix products


@pytest.mark.parametrize("ranks, gpus_here, divided_by", ((2, 1, 1), (8, 8, 8), (1, 8, 1)))
def test_mfu_is_of_the_gpus_in_use(ranks, gpus_here, divided_by, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus_here)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    config = preset("small")
    found = gpus.mfu(1e6, config, config.seq, "bf16", ranks, torch.device("cuda", 0))
    flops = 6 * (85_645_824 - 512 * 768) + 12 * 12 * 768 * 512
    assert found == pytest.approx(flops * 1e6 / (989e12 * divided_by), abs=1e-4)
