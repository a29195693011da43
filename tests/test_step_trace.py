"""The trace of ZeRO-3's step is the sequence at the top of the chapter, in the order of the events."""

import os
import re
from unittest.mock import patch

import torch
import torch.distributed as dist

from zero3 import ZeRO3
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.step_trace import UnitTrace
from zerolab.measure.timeline import Timeline
from zerolab.measure.traffic import TrafficLedger
from zerolab.run.model import GPT, GPTConfig, next_token_loss
from zerolab.run.pool import run_on_ranks

# What is shown of a step with three units. It is the sequence at the top of zero3.py.
FORWARD = [
    "gather root, 0 | compute root",
    "gather 1 | compute 0 | free 0",
    "gather 2 | compute 1 | free 1",
    "compute 2 | free 2",
    "compute root",
]
BACKWARD = [
    "gather 2 | compute root",
    "gather 1 | compute 2 | free 2, reduce 2",
    "gather 0 | compute 1 | free 1, reduce 1",
    "compute 0 | free 0, reduce 0",
    "compute root | free root, reduce root",
]


def traced() -> dict:
    """The trace of a toy GPT's second training step, 120 columns wide, and what the ledgers measure in it."""
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
    with MemoryLedger() as memory:
        model = GPT(GPTConfig(3, 32, 2, seq=32))
        engine = ZeRO3(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        engine.training_step(tokens, tokens, next_token_loss)
        trace = UnitTrace(engine, memory)
        with TrafficLedger() as traffic, Timeline(engine, listener=trace):
            engine.training_step(tokens, tokens, next_token_loss)
    with MemoryLedger(engine) as memory:
        engine.training_step(tokens, tokens, next_token_loss)
    with patch.dict(os.environ, COLUMNS="120"):  # whatever terminal the tests are started from
        lines = trace.lines
    return {"lines": lines, "sent": traffic.sent_bytes, "peak": memory.peak}


def test_the_trace_is_the_chapters_sequence():
    for found in run_on_ranks(2, traced):
        lines = [line.replace("blocks.", "") for line in found["lines"]]
        texts = [re.split(r"   +\d", line)[0].strip() for line in lines if not line.startswith("  holds")]
        first, second, third = (
            texts.index(f"Step {step}") for step in ("1 forward", "2 backward", "3 reduce gradients")
        )
        assert texts[first + 1 : second] == FORWARD, "\n".join(lines)
        assert texts[second + 1 : third] == BACKWARD, "\n".join(lines)
        rows = [re.search(r"(\d+\.\d\d) +(\d+\.\d\d)  #*$", line) for line in lines if "compute" in line]
        live = [float(row[2]) for row in rows]
        assert abs(max(live) - found["peak"] / 1e6) < 0.06  # gloo's threads
        assert live[:4] == sorted(live[:4])  # activations pile up in forward
        sent = sum(float(row[1]) for row in rows)
        assert abs(sent - found["sent"] / 1e6) < 0.06  # two digits each
