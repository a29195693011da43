"""Shared by tests with several ranks: the ranks, unusual models and their batches, a reference process, a recorder.

    @pytest.mark.parametrize("ranks", [2, 3])
    @on_every_rank
    def test_something(ranks):
        ...                                      the body runs on every rank, all at the same time

or, without pytest: `run_on_ranks(3, function, *args)` returns what `function(*args)` returns on each rank.
"""

import copy
import functools
import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zerolab.measure.held import tensor_leaves
from zerolab.run.pool import run_on_ranks


def on_every_rank(test):
    """A decorator: the body of a test runs on each of `ranks` processes, and fails if it fails on any of them."""

    @functools.wraps(test)
    def start(ranks, **arguments):
        run_on_ranks(ranks, run_body, test.__module__, test.__name__, {"ranks": ranks, **arguments})

    return start


def run_body(module, name, arguments):
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


# Models. All take tokens (batch, 6) and return (batch, 3).

WORDS, WIDTH = 11, 5


class Block(nn.Module):
    """Sizes that no number of ranks divides, a scalar, and parameters that are not contiguous."""

    def __init__(self, hidden=7):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Parameter(torch.randn(hidden, WIDTH).t())
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x + self.scale * nn.functional.linear(torch.tanh(self.up(x)), self.down)


class Blocks(nn.Module):
    """An embedding, blocks of different sizes and a head."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(7 + 2 * index) for index in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def call(self, block, x):
        return block(x)


class Tied(Blocks):
    """The head has the embedding's weight, and two blocks share a layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].up = self.blocks[2].up = nn.Linear(WIDTH, 7)
        self.blocks[2].down = nn.Parameter(torch.randn(WIDTH, 7))

    def forward(self, tokens):
        return super().forward(tokens)[:, :3]


class Frozen(Blocks):
    """Frozen parameters inside and outside the blocks, some of them integers, and buffers of several kinds."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.requires_grad_(False)
        self.factor = nn.Parameter(torch.linspace(0.1, 0.2, WIDTH), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(WIDTH, dtype=torch.int16), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-0.2, 0.2, WIDTH))
        self.register_buffer("columns", torch.linspace(0, 0.3, 2 * WIDTH).view(-1, 2)[:, 1])  # a view with gaps
        self.register_buffer("expanded", torch.full((1,), 0.02).expand(WIDTH))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))
        self.register_buffer("sparse", torch.eye(WIDTH).to_sparse())
        self.register_buffer("nothing", None)

    def call(self, block, x):
        x = torch.sparse.mm(self.sparse.to(x.dtype), x.t()).t()
        return block(x * self.factor + self.shift + self.columns * self.mask + self.expanded * self.codes)


class Recomputed(Blocks):
    """Activation checkpointing: each block runs again in backward."""

    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class Twice(Blocks):
    """One block runs twice in a forward."""

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        first, second, third = self.blocks
        for block in (first, second, first, third):
            x = block(x)
        return self.head(x)


class Tiny(nn.Module):
    """Three elements to train, so some ranks have only padding."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, tokens):
        return (tokens.to(self.bias.dtype).mean(1, keepdim=True) + self.bias).tanh()


class Dtypes(Blocks):
    """Real and complex parameters inside and outside one block, and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.blocks[1] = Turned()

    def call(self, block, x):
        return block((x * self.turn).real)


class Turned(Block):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x):
        return super().forward((x * self.turn).real + self.empty.sum())


class Nested(Blocks):
    """Nested containers that are never called, a dictionary of modules, and a list of parameters."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([nn.ModuleList([Block(3), Block(4)]), nn.Sequential(Block(5), nn.Tanh())])
        self.by_name = nn.ModuleDict({"a": Block(6)})
        self.loose = nn.ParameterList([torch.ones(WIDTH)])

    def call(self, block, x):
        if block is self.blocks[1]:
            (first, second), tower = self.towers
            x = self.by_name["a"](tower(second(first(x)))) * self.loose[0]
        return block(x)


class Normed(Blocks):
    """A norm behind the embedding: its weight, which the root has, is the last one that backward asks for."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def call(self, block, x):
        return super().call(block, self.norm(x) if block is self.blocks[0] else x)


class Probe(nn.Module):
    """A loss that does not leave by the output, as in the comment in zero3.py."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.loss = self.linear(x).square().mean()
        return x


class SideLoss(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks.append(Probe())


def with_side_loss(model, inputs, targets):
    """`mse`, and the side losses of the model or of the engine's model."""
    loss = mse(model, inputs, targets)
    for block in getattr(model, "model", model).blocks:
        if isinstance(block, Probe):
            loss = loss + block.loss
    return loss


class RecomputesInside(Block):
    """A checkpoint inside the unit, as in the comment in zero3.py."""

    def __init__(self):
        nn.Module.__init__(self)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + checkpoint(self.linear, x, use_reentrant=False)


class PartlyRecomputed(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(RecomputesInside() for _ in range(3))


def seeded(make, *args, seed=0, dtype=torch.float64):
    """The same model on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(*args)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def different_on_ranks(model):
    """A copy with different values on every rank except rank 0. A stage must start all ranks with rank 0's values."""
    model = copy.deepcopy(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            in_memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            in_memory += dist.get_rank() / 10
    return model


def batch(step, rank, size=4, dtype=torch.float64):
    """(tokens (size, 6), targets (size, 3)), different in every step and on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(WORDS, (size, 6), generator=generator)
    return tokens, torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype)


def concatenated(step, ranks, **options):
    """The batches of these ranks, concatenated."""
    return [torch.cat(parts) for parts in zip(*[batch(step, rank, **options) for rank in ranks])]


def own_batch(step, **options):
    return batch(step, dist.get_rank(), **options)


def mse_loss(output, targets):
    """In the targets' dtype, because torch before 2.13 cannot differentiate a loss of two dtypes."""
    return nn.functional.mse_loss(output.to(targets.dtype), targets)


def mse(model, inputs, targets):
    return mse_loss(model(inputs), targets)


# One process to compare with.

EXACT = 1e-12  # float64 rounds at 1e-16. The order of sums differs between one process and N, which causes about 1e-15.
# With SGD, momentum and decay every gradient leaves a trace in the weights, so a missing or doubled one is noticed.
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1)


def whole_weights(engine):
    """{name: a copy of the whole parameter} of a stage, on every rank. All ranks call it."""
    units = getattr(engine, "units", [])
    for unit in units:
        unit.start_gather()
        unit.wait()
    copies = {name: param.detach().clone() for name, param in engine.model.named_parameters()}
    for unit in units:
        unit.free()
    return copies


def same(found, expected, tolerance=0.0, what="value"):
    """Raise AssertionError unless tensors differ by at most `tolerance`, and anything else is equal."""
    if not isinstance(expected, torch.Tensor):
        assert found == expected, f"{what}: {found!r}, expected {expected!r}"
    else:
        assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        apart = (found - expected).abs().max().item() if found.numel() else 0.0
        assert apart <= tolerance, f"{what}: differs by {apart:.3g}, at most {tolerance:.3g} is allowed"


def raised_on_every_rank(error, text, function, *args, **kwargs):
    """Check that `function` raises `error` with `text` in its message. Every rank calls this."""
    try:
        function(*args, **kwargs)
    except error as caught:
        assert text in str(caught), f"expected {text!r} in the message: {caught}"
    else:
        raise AssertionError(f"nothing was raised, expected {error.__name__} with {text!r}")


# The collectives and the memory of a rank.

KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
}


class Recorder(TorchDispatchMode):
    """Record every operation that torch dispatches on this rank while the `with` block runs, also in backward.

    alive        tensors that exist before the block begins
    probe        a function that is called after each operation; `probed` is the list of its values

    collectives  [(kind, elements of the whole buffer)], in the order in which they were issued
    operations   the names of all operations; the name of a collective is its kind
    peak         the most bytes that were alive after an operation, in `alive` and in tensors from operations in the
                 block. A storage that was freed by resizing counts 0. Copies inside a backend are not counted: gloo's
                 reduce-scatter makes one of its input.
    """

    def __init__(self, *alive, probe=None):
        super().__init__()
        self.probe = probe
        self.probed = []
        self.collectives = []
        self.operations = []
        self.peak = 0
        self.storages = {}  # address -> weak reference, which also keeps the address from being used again
        self.add(storages_of(alive))

    def add(self, storages):
        for storage in storages:
            if storage._cdata not in self.storages:
                self.storages[storage._cdata] = StorageWeakRef(storage)

    def live_bytes(self):
        total = 0
        for address, weak in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.storages[address]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read, written = storages_of((args, kwargs)), storages_of(result)
        addresses = [storage._cdata for storage in read]
        self.add(storage for storage in written if storage._cdata not in addresses)  # not views of existing storages
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            name = KINDS.get(name, name)
            sizes = [each.numel() for each in tensor_leaves((args, kwargs))]
            self.collectives.append((name, max(sizes, default=0)))
        self.operations.append(name)
        self.peak = max(self.peak, self.live_bytes())
        if self.probe is not None:
            self.probed.append(self.probe())
        return result


def storages_of(values):
    return [each.untyped_storage() for each in tensor_leaves(values) if each.layout is torch.strided]
