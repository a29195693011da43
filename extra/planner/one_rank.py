"""The engines that can be planned, built and run by one rank on fake tensors."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import record_function
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zerolab.run import engines as registry
from zerolab.run.counterparts import DDPStandIn
from zerolab.run.model import GPT, GPTConfig, next_token_loss
from zerolab.run.names import engines_of
from zerolab.run.recompute import checkpoint_blocks

# From the first one, for a model that fits anyway, to the last one, for a model that fits with no other.
ENGINES = engines_of("plan")
BY_UNIT = tuple(name for name in ENGINES if "prefetch" in registry.ENGINES[name].takes)
BUCKETED = tuple(name for name in ENGINES if "bucket_mb" in registry.ENGINES[name].takes)
DDP_BUCKET_MB = 25  # MiB, as torch has it


@dataclass(frozen=True)
class Setup:
    """An engine on one of `ranks` ranks, and its options. Equal setups have the same events.

    A step has `accumulate` micro-batches of `micro_batch` sequences. `bucket_mb` (MiB) is for buckets, and `prefetch`
    for ZeRO-3's units. `recompute` is one of `RECOMPUTED` in parser.py: nothing, whole blocks, or torch's selective
    checkpointing, which keeps every second matrix product and all attention. `row` is for `hybrid`, which is ZeRO-3 in
    rows of `row` ranks. The rows are replicas of each other.
    """

    config: GPTConfig
    engine: str
    ranks: int
    precision: str = "bf16"
    micro_batch: int = 1
    accumulate: int = 1
    recompute: str = "none"
    prefetch: int = 1
    bucket_mb: float | None = None
    row: int | None = None

    @property
    def tokens(self) -> int:
        """The tokens of a rank in a step."""
        return self.micro_batch * self.accumulate * self.config.seq


def parameters_of(config: GPTConfig) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) pairs of a model with this shape, without values."""
    with torch.device("meta"):
        return list(GPT(config).named_parameters())


def mesh_for(setup: Setup):
    """The grid of hybrid sharding, or None for other engines. Make it before FakeTensorMode begins."""
    return grid(setup.ranks, setup.row) if setup.row else None


def grid(ranks: int, row: int):
    """The ranks in rows of `row` ranks. The rows are replicas of each other."""
    return init_device_mesh("cpu", (ranks // row, row), mesh_dim_names=("replicas", "shards"))


def build(setup: Setup, mesh):
    """The engine with a new model, inside FakeTensorMode and a process group."""
    dtype, name = registry.DTYPES[setup.precision], setup.engine
    model = GPT(setup.config)
    if setup.recompute != "none":
        more = {"context_fn": _every_second_product} if setup.recompute == "selective" else {}
        checkpoint_blocks(model, casts=False, **more)
    # fused, as on a GPU: one kernel reads and writes each number once.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name == "ddp" and dtype is not None:
        return DDPStandIn(model, optimizer, setup.bucket_mb or DDP_BUCKET_MB, dtype)
    options = {"mesh": mesh, "bucket_mb": setup.bucket_mb, "prefetch": setup.prefetch, "dtype": dtype}
    takes = {key: value for key, value in options.items() if key in registry.ENGINES[name].takes}
    return registry.build(name, model, optimizer, torch.device("cpu"), **takes)


def _every_second_product():
    """The policy of torchtitan's "selective by operator": keep attention and every second product of matrices."""
    seen = {False: 0, True: 0}

    def keep(context, operation, *args, **kwargs):
        name = operation._schema.name
        if name in ("aten::mm", "aten::addmm"):
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        else:
            kept = name.startswith("aten::_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)


def train(engine, setup: Setup) -> None:
    """One step of `accumulate` micro-batches. The engine decides what it sends in each.

    DDP and ZeRO-1 add up and send once. ZeRO-2, ZeRO-3 and FSDP2 send in every backward, because they keep no whole
    gradients.
    """
    tokens = torch.zeros(setup.micro_batch, setup.config.seq + 1, dtype=torch.int64)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    for number in range(setup.accumulate):
        if isinstance(engine, DDPStandIn):
            engine.sends = number == setup.accumulate - 1
        with record_function("step 1 forward"):
            loss = next_token_loss(engine(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()
        del loss
    engine.step()
    engine.zero_grad()
