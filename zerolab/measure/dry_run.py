"""One engine's row of the dry run: only rank 0 of N exists. It takes two steps, and the second one is measured."""

import argparse
import contextlib
import gc
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zerolab.measure.fake_ranks import build_alone
from zerolab.measure.held import optimizer_of
from zerolab.measure.ledger import PARTS, PartsLedger
from zerolab.measure.memory_formulas import PEAKS, held_by_formula, letters
from zerolab.measure.traffic import Collective
from zerolab.measure.watched_step import allocator_of, watched_step
from zerolab.run import micro_batches
from zerolab.run.engines import DTYPES, ENGINES
from zerolab.run.model import GPT, GPTConfig, next_token_loss, preset
from zerolab.run.recompute import checkpoint_blocks

POINTS = 120  # of a curve, in each phase


def row_of(name: str, options: argparse.Namespace) -> dict:
    """One engine's row, of the second step: the first one allocates the optimizer's state. Needs a process group.

    On a GPU that is too small: {"out_of_memory": torch's message}.
    """
    device = torch.device("cpu") if options.device == "fake" else torch.device(options.device, 0)
    try:
        return watched_row(name, options, device)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).split(". ")[0]}
    finally:
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()


def watched_row(name: str, options: argparse.Namespace, device: torch.device) -> dict:
    """`row_of`, if there is enough memory."""
    real = options.device != "fake"
    allocator = allocator_of(device)
    fake = contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with fake, PartsLedger() as memory:
        model = make_model(preset(options.preset), device)
        dtype = DTYPES[options.dtype]
        if options.checkpoint_activations:
            checkpoint_blocks(model, casts=ENGINES[name].casts and dtype is not None)
        of = letters(model, options.ranks)
        # foreach, CUDA's default, allocates intermediates as large as the parameters, which no engine causes.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=device.type != "cpu")
        engine = build_alone(name, model, optimizer, device, dtype=dtype)
        del model, optimizer
        tokens = torch.zeros(options.batch, options.seq + 1, dtype=torch.int64, device=device)
        batch = tokens[:, :-1], tokens[:, 1:], next_token_loss, options.accumulate
        micro_batches.training_step(engine, *batch)
        if name == "ddp" and real:
            micro_batches.training_step(engine, *batch)  # DDP rebuilds its buckets once, in its second step
        with watched_step(engine, memory, allocator) as seen:
            micro_batches.training_step(engine, *batch)
        tensors = sum(len(group["params"]) for group in optimizer_of(engine).param_groups)
        del engine
    held = held_by_formula(name, options.dtype, of.Ψ, options.ranks)
    formula = PEAKS.get(name) if options.dtype == "fp32" and options.accumulate == 1 else None
    peak = memory.peak_moment()
    row = {
        "held_bytes": seen.held,
        "formula_bytes": held,
        "difference_bytes": sum(seen.held.values()) - held,
        "step_counters_bytes": 4 * tensors,  # AdamW has a step counter for each tensor, in float32
        "peak_bytes": seen.peak if allocator else peak.live,
        "peak_where": {"step": peak.step, "module": peak.module},
        "peak_parts": {part: peak.parts[part] for part in PARTS if peak.parts[part]},
        "state_peak_bytes": memory.peak_moment(of=lambda moment: moment.state).state,
        "state_peak_formula": formula and formula.text,
        "state_peak_formula_bytes": formula and round(formula.bytes(of)),
        "sent_bytes": seen.sent_bytes,
        "sent_elements": seen.sent_elements,
        "sent": sent_by_kind(seen.collectives),
        "curve": curve(memory),
    }
    if allocator:
        row["ledger_peak_bytes"] = peak.live  # in addition to the allocator's
    if name == "ddp" and not real:
        row["stand_in"] = True
    return row


def make_model(config: GPTConfig, device: torch.device) -> GPT:
    """A GPT whose weights have the correct sizes. On a GPU they are drawn there, because their values do not matter."""
    if device.type == "cpu":
        return GPT(config)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    if config.tied:
        model.head.weight = model.tokens.weight  # to_empty unties weights
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    return model


def sent_by_kind(collectives: Iterable[Collective]) -> dict[str, dict]:
    """{kind: {"bytes", "elements", "count"}}"""
    found: dict[str, Counter] = {}
    for one in collectives:
        row = found.setdefault(one.kind, Counter())
        row.update(bytes=one.sent_bytes, elements=one.sent_elements, count=1)
    return {kind: {what: round(number) for what, number in row.items()} for kind, row in found.items()}


def curve(memory: PartsLedger) -> dict[str, list]:
    """Live bytes during the step: POINTS intervals per phase, with the highest and the lowest moment of each.

    {"phase": ["1 forward", ...], "progress": [0 to 1 within the phase], part: [MB], ...}, where MB are 10^6 bytes.
    """
    phases: dict[str, list] = {}
    for moment in memory.moments():
        if moment.phase:
            phases.setdefault(moment.phase, []).append(moment)
    result = {"phase": [], "progress": [], **{part: [] for part in PARTS}}
    for phase, moments in phases.items():
        stretch = -(-len(moments) // POINTS)
        for start in range(0, len(moments), stretch):
            numbers = range(start, min(start + stretch, len(moments)))
            lowest = min(numbers, key=lambda number: moments[number].live)
            highest = max(numbers, key=lambda number: moments[number].live)
            for number in sorted({lowest, highest}):
                result["phase"].append(phase)
                result["progress"].append(round(number / len(moments), 4))
                for part in PARTS:
                    result[part].append(round(moments[number].parts[part] / 1e6, 2))
    return result
