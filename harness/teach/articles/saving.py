"""Claims about checkpoints and restarts: what each rank writes, how long it takes, and what a lost rank means."""

import json
import math
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from harness.engine import checkpoint
from harness.measure.dry_run import fake_ranks
from harness.teach.articles.claim import FRAMEWORKS, SHARDING_STATE, Claim, about, gb, holds_when
from harness.teach.articles.runs import batch_for, build, chain, loss_for, one_rank, parameters_of, toy

RANKS = 4
RUN = Path(__file__).parents[3] / "results" / "train-zero2-cpu.jsonl"  # recorded: see docs/checkpoints.md
# The article's numbers: a checkpoint of bfloat16 weights in one file, and by 64 ranks at once.
ONE_FILE = 600, 1200  # seconds
BY_RANKS, WRITERS, IN_ALL = 5, 64, 30
WEIGHTS, EVERYTHING = 2, 12  # bytes per parameter: in bfloat16; float32 with AdamW's two moments


def plan_of(build_model, name: str, rank: int):
    """(planner, plan): what rank `rank` of 4 would write after a step, as torch's planner has it."""
    planner = dcp.DefaultSavePlanner()
    with fake_ranks(RANKS, rank):
        model = build_model()
        engine, (inputs, targets) = build(name, model), batch_for(model)
        loss_for(model)(engine(inputs), targets).backward()
        engine.step()
        engine.zero_grad()
        if name == "plain":  # on every rank the same, as DDP has it
            weights, moments = get_state_dict(model, engine.optimizer)
            state = {"model": weights, "optim": moments}
        else:
            parts = checkpoint._state(engine, {}, copied=False)
            state = {part: parts[part] for part in ("model", "optim")}
        planner.set_up_planner(state, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        del engine
    return planner, plan


def shares(build_model, name: str) -> list[float]:
    """Of all bytes of tensors, what each of 4 ranks writes. The planner raises if together they miss something."""
    planners, plans = zip(*(plan_of(build_model, name, rank) for rank in range(RANKS)))
    final, _ = planners[0].create_global_plan(list(plans))
    each = [
        sum(
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            for item in plan.items
            if item.tensor_data is not None
        )
        for plan in final
    ]
    return [nbytes / sum(each) for nbytes in each]


def share_of_each_rank() -> tuple[str, str]:
    """A state that is cut among the ranks, and one that all have: there torch gives each rank some of the tensors."""
    cases = {
        "ZeRO-3, a GPT": shares(toy, "zero3"),
        "ZeRO-3, 3 layers": shares(partial(chain, 3), "zero3"),
        "DDP, a GPT": shares(toy, "plain"),
        "DDP, 3 layers": shares(partial(chain, 3), "plain"),
    }
    measured = "; ".join(f"{what}: {', '.join(f'{share:.2f}' for share in own)}" for what, own in cases.items())
    even = [all(about(share, 1 / RANKS, 0.1) for share in own) for own in cases.values()]
    condition = "the state is sharded, or is in many tensors: what all ranks have is divided by whole tensors"
    return f"shares of {RANKS} ranks: {measured}", holds_when(condition, all(even[:3]), even[3])


def five_seconds() -> tuple[str, str]:
    """Many writers are as many times faster than one, if each has its rate. The rest the storage must have."""
    total = WEIGHTS * parameters_of("70b")
    each = [seconds / WRITERS for seconds in ONE_FILE]
    everything = EVERYTHING / WEIGHTS * BY_RANKS
    measured = (
        f"one writer at {total / ONE_FILE[1] / 1e6:.0f} to {total / ONE_FILE[0] / 1e6:.0f} MB/s; {WRITERS} such "
        f"writers {each[0]:.1f} to {each[1]:.1f} s; {BY_RANKS} s are {gb(total / BY_RANKS)}/s in all, and "
        f"with AdamW's state {everything:.0f} s (computed, nothing was written)"
    )
    condition = "the storage takes 28 GB/s in all, faster than 64 of its single writers, and weights alone are saved"
    fast_storage = total / 28e9 <= BY_RANKS * 1.05
    return measured, holds_when(condition, fast_storage, min(each) <= BY_RANKS * 1.05)


def thirty_seconds() -> tuple[str, str]:
    """Its overhead of a save in its plan, against the time that it gave for one. Its plan has no other numbers."""
    weights, everything = BY_RANKS, BY_RANKS * EVERYTHING / WEIGHTS
    measured = (
        f"its own save takes {weights} s: {IN_ALL / weights:.0f} times less; at that rate float32 weights and moments "
        f"({EVERYTHING} bytes per parameter, not {WEIGHTS}) take {everything:.0f} s; {IN_ALL} s in 4 hours are "
        f"{IN_ALL / (4 * 3600):.1%}"
    )
    condition = "the optimizer's state is saved as well, and training waits"
    return measured, holds_when(condition, about(everything, IN_ALL, 0.05), about(weights, IN_ALL, 0.05))


def synchronous_saves() -> tuple[str, str]:
    """A save every hour, in which the cluster waits: what of the time is lost, in one file and in shards?"""
    file, shards = ONE_FILE[0] / 3600, BY_RANKS / 3600
    measured = (
        f"every hour, by its numbers: one file of 10 min {file:.0%} of the time, {BY_RANKS} s by ranks {shards:.2%}"
    )
    return measured, holds_when("one rank writes everything", file > 0.1, shards > 0.1)


def fragile() -> tuple[str, str]:
    """One bit of a saved tensor is flipped: does the one who loads it hear of it?"""

    def flip(folder: Path) -> None:
        file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        place = content.find(torch.full((8,), 2.0).numpy().tobytes())  # inside a weight
        content[place + 2] ^= 1
        file.write_bytes(content)

    def after(load) -> str:
        try:
            return "loads" if load() else "is right"
        except Exception as error:
            return type(error).__name__

    with one_rank(), tempfile.TemporaryDirectory() as folder:
        model = chain(2)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(2.0)
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        dcp.save({"model": model.state_dict()}, checkpoint_id=theirs)
        engine = build("zero3", model)
        saved = checkpoint.save(engine, ours)
        flip(theirs), flip(saved.path)
        state = {"model": chain(2).state_dict()}

        def load_theirs() -> bool:
            dcp.load(state, checkpoint_id=theirs)
            return any((weight != 2.0).any() for weight in state["model"].values())

        found = {"torch's save and load": after(load_theirs)}
        found["with a sum per file"] = after(lambda: checkpoint.load(engine, ours) is not None)
        engine.close()
    measured = "a flipped bit: " + ", ".join(f"{who}: {what}" for who, what in found.items())
    silent = [what == "loads" for what in found.values()]
    return measured, holds_when("nothing checks what was written", *silent)


def remove_a_rank() -> tuple[str, str]:
    """Of the recorded run: who was there after each start, and which steps had to be made again?"""
    lines = [json.loads(line) for line in RUN.read_text().splitlines()]
    starts = [line for line in lines if line.get("event") == "start"]
    ranks = [start["ranks"] for start in starts]
    again = [line["repeated"] for line in lines if line.get("event") == "restart"]
    stayed = [set(a["processes"]) & set(b["processes"]) for a, b in zip(starts, starts[1:])]
    ended = lines[-1].get("why") == "done"
    measured = (
        f"a recorded run on {', '.join(map(str, ranks))} ranks {'ended well' if ended else 'did not end'}; at each "
        f"start {', '.join(str(len(both)) for both in stayed)} of the processes before, and "
        f"{', '.join(map(str, again))} steps made again from a checkpoint, which gave the shards"
    )
    smaller = any(b < a for a, b in zip(ranks, ranks[1:]))
    condition = "all ranks may start again, and the checkpoint is one that another number of ranks can load"
    in_place = smaller and all(stayed) and not any(again)
    return measured, holds_when(condition, smaller and ended, in_place)


CLAIMS = [
    Claim(SHARDING_STATE, "checkpointing becomes fragile",
          "a bit flipped in two checkpoints, both loaded", fragile),
    Claim(FRAMEWORKS, "each GPU writes total / N of a distributed checkpoint",
          "what each of 4 ranks plans to write, under ZeRO-3 and DDP", share_of_each_rank),
    Claim(FRAMEWORKS, "140 GB by 64 ranks: 5 seconds instead of 20 minutes",
          "its own numbers, and the parameters of the 70b preset", five_seconds),
    Claim(FRAMEWORKS, "saving takes ~30 seconds every ~4 hours", "set against its 5 seconds", thirty_seconds),
    Claim(FRAMEWORKS, "synchronous saves kill throughput", "its own numbers, recomputed", synchronous_saves),
    Claim(FRAMEWORKS, "TorchElastic removes a failed rank and rebalances the shards",
          "a recorded run under torchrun that lost a machine and got it back", remove_a_rank),
]  # fmt: skip
