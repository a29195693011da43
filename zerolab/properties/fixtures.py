"""What properties share: models of awkward shapes, data that differs per rank, optimizers, groups, and the `Pair`."""

import contextlib
import copy
import functools
import importlib
import io
from collections.abc import Callable
from functools import partial

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from zerolab.measure.held import storage_bytes
from zerolab.properties.property import Subject, same
from zerolab.run.engines import STAGES  # noqa: F401  tests use it as fixtures.STAGES
from zerolab.run.model import GPT, next_token_loss, preset

# Models: awkward sizes for values, large layers for bytes.


class OddBlock(nn.Module):
    """Sizes that no N from 2 to 4 divides, a scalar, and a parameter of two elements."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up = nn.Linear(5, hidden)
        self.down = nn.Linear(hidden, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.pair = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x))) + self.pair.sum()


class OddModel(nn.Module):
    """An embedding (whose input needs no gradient), blocks of different sizes, and a head.

    Frozen is a scale outside of the blocks, beside a buffer; or, with `frozen_block`, a layer inside that block.
    """

    def __init__(self, blocks: int = 3, frozen_block: int | None = None):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(OddBlock(7 + 2 * i) for i in range(blocks))
        self.scaled = frozen_block is None
        if self.scaled:
            self.frozen = nn.Parameter(torch.full((5,), 1.5), requires_grad=False)
            self.register_buffer("shift", torch.linspace(-1, 1, 5))
        else:
            self.blocks[frozen_block].up.requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def features(self, tokens):
        x = self.embedding(tokens).mean(1)
        if self.scaled:
            x = x * self.frozen + self.shift
        return through(x, self.blocks)

    def forward(self, tokens):
        return self.head(self.features(tokens))


class Twice(OddModel):
    """A block that runs twice in one forward, and a weight that embedding and head share."""

    def __init__(self):
        super().__init__(blocks=2, frozen_block=0)
        self.requires_grad_()  # nothing is frozen
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        first, second = self.blocks
        return self.head(through(self.embedding(tokens).mean(1), (first, second, first)))[:, :3]


class Stack(nn.Module):
    """Wide layers and hardly any activations, so that live bytes are parameters and gradients."""

    def __init__(self, layers: int = 8, width: int = 64, reverse: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.reverse = reverse  # use the last layer first: gradients then finish in the opposite order

    def forward(self, x):
        return through(x, reversed(self.layers) if self.reverse else self.layers)


class PartlyFrozen(OddModel):
    """Units that mix frozen and trainable parameters, one of them trained only after its frozen part (LoRA)."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(5, 5)
            self.base.requires_grad_(False)
            self.low, self.high = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

        def forward(self, x):
            return torch.tanh(self.base(x) + self.high(self.low(x)))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Adapter() for _ in range(3)])
        self.blocks[1].requires_grad_(False)  # a unit with nothing to train, in between


class TiedAcross(nn.Module):
    """An embedding outside the units whose weight is the head's, which lies inside one; 11 rows, uneven."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([OddBlock(7), nn.Sequential(nn.Tanh(), nn.Linear(5, 11, bias=False))])
        self.blocks[1][1].weight = self.embedding.weight

    def forward(self, tokens):
        return through(self.embedding(tokens).mean(1), self.blocks)[:, :3]


class SharedInside(TiedAcross):
    """Two units that hold the same layer, beside others of their own."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), shared) for _ in range(2)])


class Nested(nn.Module):
    """Containers in containers, a shared block, a bare parameter beside them: all must be managed by somebody."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(5, 5)
        self.towers = nn.ModuleList(
            [nn.ModuleList([nn.Linear(5, 5), shared]), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.ReLU()]
        )
        self.by_name = nn.ModuleDict({"a": nn.Linear(5, 5)})
        self.tail = nn.Sequential(shared, nn.Linear(5, 3))
        self.loose = nn.ParameterList([nn.Parameter(torch.ones(5))])

    def forward(self, x):
        inner, *others = self.towers
        return through(x * self.loose[0], (*inner, *others, self.by_name["a"], self.tail))


class Checkpointed(OddModel):
    """Activation checkpointing around each unit, or around `several`."""

    def __init__(self, several: int = 1, use_reentrant: bool = False):
        super().__init__(blocks=4)
        self.several, self.use_reentrant = several, use_reentrant

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for first in range(0, 4, self.several):
            x = checkpoint(through, x, self.blocks[first : first + self.several], use_reentrant=self.use_reentrant)
        return self.head(x)


class Lanes(nn.Module):
    """Units of different sizes, which their bytes tell, or of the same: run in the order of `way`, without `skip`."""

    def __init__(self, sizes=(8, 9, 8, 9)):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for size in sizes])
        self.way, self.skip = range(len(sizes)), None

    def forward(self, x):
        return through(x, [self.blocks[index] for index in self.way if index != self.skip])


class Branches(OddModel):
    """Two heads more, of which a group uses one; nobody uses its own."""

    def __init__(self):
        super().__init__(blocks=1)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, tokens, head):
        return self.heads[head](self.features(tokens))


class Keeping(nn.Module):
    """It keeps something besides tensors, which goes into the state of the model."""

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def through(x, blocks):
    for block in blocks:
        x = block(x)
    return x


def seeded(build: Callable[[], nn.Module], seed: int = 0, dtype=torch.float64, device=None) -> nn.Module:
    """The same model wherever it is called, without disturbing the rank's own random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's, where it is built; `manual_seed` sets the GPUs' too
        return build().to(dtype).to(device)


def started_by(rank: int, build=OddModel) -> nn.Module:
    """An `OddModel` as this rank alone starts it: what no seed makes differ is another one, too."""
    model = seeded(build, rank)
    with torch.no_grad():
        model.frozen.add_(rank * model.shift)
        model.shift.add_(rank)
    return model


def stack(layers: int, width: int, reverse: bool = False, kind=Stack) -> nn.Module:
    return seeded(lambda: kind(layers, width, reverse), dtype=torch.float32)


# Data.


def drawing(step: int, rank: int) -> torch.Generator:
    """What draws another batch for every rank and step."""
    return torch.Generator().manual_seed(1_000 * step + rank)


def token_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (4, 6) int64, classes (4,) int64), another for every rank and step."""
    generator = drawing(step, rank)
    tokens = torch.randint(11, (4, 6), generator=generator)
    return tokens, torch.randint(3, (4,), generator=generator)


def vector_batch(step: int, rank: int, width: int = 64, dtype=torch.float32, batch: int = 1):
    """(inputs (batch, width), targets (batch, width)), another for every rank and step."""
    generator = drawing(step, rank)
    x = torch.randn(batch, width, generator=generator, dtype=dtype)
    return x, torch.randn(batch, width, generator=generator, dtype=dtype)


def own_tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's `token_batch`."""
    return token_batch(step, dist.get_rank())


# A small GPT, its data, which is another for every rank and step, and its loss.


def gpt(dtype: torch.dtype = torch.float32, device: str | None = None) -> GPT:
    return seeded(lambda: GPT(preset("toy")), 0, dtype, device)


def byte_batch(step: int, rank: int, device: str | None = None, rows: int = 2):
    drawn = torch.randint(256, (rows, 17), generator=drawing(step, rank)).to(device)
    return drawn[:, :-1], drawn[:, 1:]


# Optimizers.


class Averaging(torch.optim.SGD):
    """Schedule-free in its form: `eval()` puts the averages into the weights, `train()` puts back what is trained.

    Its state has a dictionary, and one of numpy's numbers.
    """

    @torch.no_grad()
    def step(self):
        super().step()
        for param in all_params(self):
            own = self.state[param]
            averages = own.setdefault("averages", {"mean": param.clone(), "times": 0})
            averages["mean"].lerp_(param, 0.25)
            averages["times"] += 1
            own["seen"] = own.get("seen", numpy.int64(0)) + 1

    @torch.no_grad()
    def eval(self):
        for param in all_params(self):
            kept, mean = param.clone(), self.state[param]["averages"]["mean"]
            param.copy_(mean)
            mean.copy_(kept)

    train = eval  # it changes them back


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}
MOMENTUM, ADAMW, SGD = OPTIMIZERS["momentum"], OPTIMIZERS["adamw"], OPTIMIZERS["sgd"]
DECAY = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)  # a step too many, or too few, shows


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
EXACT_LOW = {**LOW, "reduce_dtype": torch.float64}  # whose sums plain PyTorch makes to the bit
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def a_step(trained, step: int = 0) -> torch.Tensor:
    """A step of an engine over an `OddModel`, on this rank's batch. Returns the loss."""
    return trained.training_step(*own_tokens(step), in_float64)


def a_step_on_vectors(trained, step: int, width: int) -> None:
    """A step of an engine over a `Stack`, on this rank's batch."""
    trained.training_step(*vector_batch(step, dist.get_rank(), width), F.mse_loss)


def odd(engine, optimizer=ADAMW, **options):
    """The engine over an `OddModel`, which starts alike on all ranks."""
    return engine(seeded(OddModel), optimizer, **options)


# Losses.


def in_float64(outputs, targets) -> torch.Tensor:
    """The loss of outputs that may be of low precision."""
    return F.cross_entropy(outputs.double(), targets)


def of_outputs(loss: Callable) -> Callable:
    """`loss(outputs, targets)` as a loss of (model, inputs, targets)."""
    return lambda model, inputs, targets: loss(model(inputs), targets)


of_output, of_vectors, of_bytes = map(of_outputs, (in_float64, F.mse_loss, next_token_loss))


# What is asked of models, ranks and engines.


def of_all_ranks(value: torch.Tensor) -> torch.Tensor:
    """Every rank's `value`. A collective of all ranks."""
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return torch.stack(everyone)


def alone():
    """The group of this rank alone."""
    own, _ = dist.new_subgroups(1)
    return own


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def trained_params(model) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def plain_step(model, optimizer, step: int = 0) -> None:
    """Plain PyTorch's, on the first rank's batch."""
    of_output(model, *token_batch(step, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def all_params(optimizer) -> list[torch.Tensor]:
    """What an optimizer updates, of all groups."""
    found = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def three_groups(model: nn.Module, named: bool = False, apart: str = "head") -> list[dict]:
    """Weight decay for matrices only, another rate for one module: groups that cut across buckets and units.

    `named`: of (name, parameter) pairs, as torch's optimizers take them, too.
    """
    matrices, others, own = [], [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            group = own if name.startswith(apart) else matrices if param.ndim >= 2 else others
            group.append((name, param) if named else param)
    return [
        {"params": matrices, "weight_decay": 0.3},
        {"params": iter(others), "weight_decay": 0.0},
        {"params": own, "lr": 0.05},
    ]


def pieces_of(engine) -> list[torch.Tensor]:
    """What the engine's optimizer updates on this rank."""
    return all_params(engine.optimizer)


def hooks_on(model, *others) -> int:
    """How many hooks there are on a model's modules and parameters, and on `others`."""
    count = 0
    for owner in (*model.modules(), *model.parameters(), *others):
        kinds = ["_backward_hooks", "_post_accumulate_grad_hooks"]
        if not isinstance(owner, torch.Tensor):
            kinds = [name for name in vars(owner) if "hooks" in name]
        count += sum(len(getattr(owner, kind) or ()) for kind in kinds)
    return count


@functools.cache
def silent_group():
    """A process group whose collectives move nothing and take no memory.

    Gloo works on a copy of a reduce-scatter's input and lets go of buffers from a thread of its own, a moment
    after `wait()`: for the exact bytes of what an engine itself keeps alive, it is left out.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    return dist.new_group(backend="fake", group_desc="silent")


@functools.cache
def mesh(**sizes: int):
    """A mesh over all ranks, of these dimensions: made once, as its groups stay (see `pool`)."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def grid(replicas: int = 2, shards: int = 2):
    """The mesh of hybrid sharding."""
    return mesh(replicas=replicas, shards=shards)


# An engine and plain PyTorch side by side: most properties of values are a few lines about such a pair.

EXACT = 1e-12  # in float64, where another order of a sum makes some 1e-15


def model_of(model) -> nn.Module:
    """The model, of an engine or as it is."""
    return getattr(model, "model", model)


def vectors(width: int) -> Callable:
    """`batch(step, rank)` of vectors, in float64."""
    return functools.partial(vector_batch, width=width, dtype=torch.float64)


VECTORS = {"loss": of_vectors, "batch": vectors(8)}  # of a `Pair` whose model takes 8 numbers, as `Lanes` does


def _moved(batch: Callable, dtype: torch.dtype | None, device, step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The batch on the device (None: where it is), and what is no whole number in `dtype` (None: as it is)."""

    def moved(part):
        return part.to(device=device, dtype=dtype if part.is_floating_point() else None)

    return tree_map_only(torch.Tensor, moved, batch(step, rank))


class Pair:
    """`trained` is the engine under test; `plain` has the same start, and its step is on the batches of all ranks.

    Plain PyTorch adds up the gradients of the ranks' losses, each divided by N, so a loss may be any function
    `loss(model, *batch)` of the model (on the other side: of the engine). `batch(step, rank)` is another for every step
    and rank. `build` makes the model of either side, or is (the plain one, the engine's). `groups(model)` gives the
    optimizer's groups. The model is in float64, unless `dtype` says otherwise (None: as it was built), and values agree
    to `atol`. With a `param_dtype` a rounded copy of `plain` computes.
    """

    def __init__(
        self,
        engine: Subject,
        build=OddModel,
        optimizer=MOMENTUM,
        *,
        loss=of_output,
        batch=token_batch,
        groups=None,
        dtype=torch.float64,
        atol: float = EXACT,
        seed: int = 0,
        device=None,
        **options,
    ):
        other = None
        if dtype is torch.float64 and engine.dtype is not dtype:  # it does not train in float64
            dtype = other = engine.dtype
            atol = max(atol, engine.atol)
        self.engine, self.loss, self.atol = engine, loss, atol
        self.keeps = False  # units may stay gathered
        self.batch = functools.partial(_moved, batch, other, device)
        group = options.get("group")
        if isinstance(group, DeviceMesh):  # on a grid of two dimensions all ranks train together
            group = group.get_group() if group.ndim == 1 else None
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        built = build if isinstance(build, tuple) else [seeded(build, seed, dtype, device) for _ in range(2)]
        self.plain, model = (each.to(dtype) for each in built)
        self.optimizer = optimizer(groups(self.plain) if groups else trained_params(self.plain))
        low = options.get("param_dtype")
        self.computes = self._rounded(low) if low else self.plain
        more = {"param_groups": groups(model)} if groups else {}
        self.trained = engine(model, optimizer, **more, **options)

    def _rounded(self, dtype: torch.dtype) -> nn.Module:
        """Mixed precision by hand: a copy in `dtype`, which hands each gradient over to `plain` and its dtype."""
        low = copy.deepcopy(self.plain).to(dtype)
        for param, of_low in zip(self.plain.parameters(), low.parameters()):

            def hand_over(of_low, param=param):
                gradient = of_low.grad.to(param.dtype) / self.size
                param.grad = gradient if param.grad is None else param.grad + gradient
                of_low.grad = None

            if param.requires_grad:
                of_low.register_post_accumulate_grad_hook(hand_over)
        return low

    @property
    def model(self) -> nn.Module:
        """The engine's."""
        return self.trained.model

    @property
    def both(self):
        """(model, optimizer) of both sides, for what a loop does to each alike: schedulers, modes, flags."""
        return (self.plain, self.optimizer), (self.model, self.trained.optimizer)

    def own_batch(self, step: int) -> tuple:
        """This rank's."""
        return self.batch(step, self.rank)

    def backward(self, step: int, *, scale: float = 1.0, quiet=False) -> None:
        """Forward and backward of both. `quiet`: the engine's under `no_sync`."""
        expected = self.backward_of_plain(step, scale)[self.rank]
        with self.trained.no_sync() if quiet else contextlib.nullcontext():
            found = self.alone(step) * scale
            found.backward()
        same("this rank's loss", found, expected, self.atol)
        self.nothing_gathered("backward")

    def backward_of_plain(self, step: int, scale: float = 1.0) -> list[torch.Tensor]:
        """What is right: one process, plain PyTorch, the backwards of all ranks' losses, which are returned."""
        parts, losses = self.size, []
        if self.computes is not self.plain:
            self.computes.load_state_dict(self.plain.state_dict())
            parts = 1  # a rounded gradient is divided when it is handed over
        for rank in range(self.size):
            losses.append(self.loss(self.computes, *self.batch(step, rank)) * scale)
            (losses[-1] / parts).backward()
        return losses

    def step_of_plain(self, step: int) -> list[torch.Tensor]:
        losses = self.backward_of_plain(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def backward_by(self, way: Callable, step: int) -> None:
        """`way(model, batch, scale)` does the backwards of a step itself, of losses that it multiplies by `scale`."""
        for other in range(self.size):
            way(self.plain, self.batch(step, other), 1 / self.size)
        way(self.trained, self.own_batch(step), 1)
        self.nothing_gathered(way.__name__)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Both clip; the norms are the same, and returned."""
        expected = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm, norm_type)
        norm = self.trained.clip_grad_norm_(max_norm, norm_type)
        what = f"the gradients' norm with norm_type {norm_type:g}"
        same(what, norm, expected, self.atol * max(1.0, expected.item()))
        return norm

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trained.step()
        self.nothing_gathered("the step")
        self.trained.zero_grad()

    def scaled_step(self, step: int, scaler, max_norm: float | None, skipped=False, spoil=lambda trained: None) -> None:
        """Backward and step of both, with a scaled loss and clipping. A step that overflows is to be `skipped`.

        `spoil` is called with the engine before its gradients are unscaled. Without a `max_norm` nothing is clipped,
        and `scaler.step` unscales.
        """
        scale = scaler.scale(torch.ones((), dtype=torch.float64, device=next(self.plain.parameters()).device))
        self.backward(step, scale=scale)
        spoil(self.trained)
        for param in self.plain.parameters():
            param.grad = None if skipped or param.grad is None else (param.grad / scale).to(param.dtype)
        if max_norm is not None:
            scaler.unscale_(self.trained)
            # Of a step that overflows nobody knows what the norm will be; all ranks ask for it.
            clip = self.trained.clip_grad_norm_ if skipped else self.clip
            clip(max_norm)
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        scaler.step(self.trained)
        scaler.update()
        self.nothing_gathered("the step")
        self.trained.zero_grad()

    def evaluate(self, what: str = "an evaluation", step: int = 9) -> None:
        """Both compute the same of this rank's batch."""
        inputs = self.own_batch(step)[0]
        with torch.no_grad():
            same(what, self.trained(inputs), self.plain(inputs), self.atol)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.backward(step)
            self.step()

    def alike(self, steps: int = 2) -> None:
        """Both train, to the same weights."""
        self.train(steps)
        self.same_weights()

    def alone(self, step: int = 9) -> torch.Tensor:
        """A forward of the engine's alone: this rank's loss."""
        return self.loss(self.trained, *self.own_batch(step))

    def step_alone(self) -> None:
        self.alone().backward()
        self.trained.step()

    def same_weights(self) -> None:
        """All ranks take part."""
        found = self.trained.full_state_dict()
        same("the weights", found, self.plain.state_dict(), self.atol)

    def nothing_gathered(self, after: str) -> None:
        """ZeRO-3 has freed all units, and the root; the chapter leaves frozen parameters whole."""
        if self.engine.like == "zero3" and not self.keeps:
            params = trained_params(self.model) if self.engine.chapter else self.model.parameters()
            same(f"bytes of parameters that are gathered after {after}", storage_bytes(params), 0)
