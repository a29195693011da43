"""The recorder of the events of a real engine's step, on fake tensors and a group that moves nothing."""

import contextlib
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from extra.planner.events import Collective, Event, Operation, Recording, Wait
from extra.planner.setup import Setup, build, train
from zerolab.measure.fake_ranks import fake_ranks
from zerolab.measure.held import tensor_leaves
from zerolab.measure.intercept import Intercepted
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.traffic import group_of, kind_of, whole_bytes, works_in

# The CPU's flash attention replaces the GPU's: it has the same products and saves the same tensors. Its backward
# computes the scores again. Operation: (the index of the queries in its arguments, number of matrix products).
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
}
NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided"}
COPIES = {"copy_", "_foreach_copy_"}
# These read nothing, or only single elements of their arguments.
WRITES_ONLY = {"zero_", "fill_", "_foreach_zero_", "zeros_like", "ones_like", "new_zeros", "full_like", "normal_",
               "nll_loss_forward", "nll_loss_backward"}  # fmt: skip


class Recorder(MemoryLedger):
    """Records a step: inside `with Recorder() as recorder`, build an engine, run a step, call `recorder.start_step()`,
    run another step, and read `recorder.events` and `recorder.peak`.

    Raises RuntimeError if an engine does not wait for the collectives of one kind in the order in which it issued them.
    """

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []
        self._on = False
        self._works: dict[str, list] = {}  # by kind: the works that nobody has waited for
        # The works of the fake group have their own `wait`.
        self._wait = Intercepted(torch._C._distributed_c10d.FakeWork, "wait")

    def start_step(self, engine=None) -> None:
        """Record the events from now on. Until now only live memory was recorded."""
        super().start_step(engine)
        self._on = True

    def __enter__(self):
        self._wait.listen(self._around_wait)
        return super().__enter__()

    def __exit__(self, *exception):
        self._wait.stop(self._around_wait)
        return super().__exit__(*exception)

    @contextlib.contextmanager
    def _around_wait(self, work, *timeout):
        for kind, works in self._works.items():
            if any(work is other for other in works):
                if works[0] is not work:
                    raise RuntimeError(f"waited for a later {kind} first: the replay supports only waits in order")
                works.pop(0)
                self.events.append(Wait(kind))
                break
        yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._on:
            if (kind := kind_of(func)) is not None:
                self._collective(kind, args, result)
            elif func.namespace == "aten":
                self._operation(func, args, kwargs, result)
        return result

    def _collective(self, kind: str, args, result) -> None:
        self.events.append(Collective(kind, whole_bytes(kind, args), group_of(args).size()))
        self._works.setdefault(kind, []).extend(works_in(result)[:1])

    def _operation(self, func, args, kwargs, result) -> None:
        name, changes = func._schema.name.removeprefix("aten::"), func._schema.is_mutable
        made, given = tensor_leaves(result), tensor_leaves((args, kwargs))
        if name in NO_KERNEL:
            return
        if not changes and {self.key(tensor) for tensor in made} <= {self.key(tensor) for tensor in given}:
            return  # a view, or no tensor
        written = _written(func, args, kwargs) if changes else made
        if name in WRITES_ONLY:
            read = []
        elif name in COPIES:
            read = tensor_leaves(args[1])
        elif name == "embedding":
            read = made  # of the table only the rows that are looked up
        else:
            read = given
        nbytes = sum(map(_nbytes, [*written, *read]))
        attends = None
        if name in ATTENTION:
            _, _, keys, size = args[ATTENTION[name][0] + 1].shape
            attends = size, keys
        self.events.append(Operation(name, _flops(func, name, args, kwargs, result), nbytes, attends))


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements. An expanded tensor counts its memory once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _written(func, args, kwargs) -> list[torch.Tensor]:
    """The tensors to which an operation writes, by its schema. (AdamW may scale gradients, and does not here.)"""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
            found += tensor_leaves(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _flops(func, name: str, args, kwargs, result) -> int:
    """The FLOPs, by torch's own table. For causal attention half of the table's value is computed."""
    if name in ATTENTION:
        first, products = ATTENTION[name]
        (batch, heads, queries, size), keys = args[first].shape, args[first + 1].shape[2]
        return products * batch * heads * queries * keys * size  # times 2 for a product, by 2 as it is causal
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def record(setup: Setup) -> Recording:
    """The events of the second step of `setup`. In the first step the optimizer creates its state."""
    with fake_ranks(setup.ranks), FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        engine = build(setup)
        train(engine, replace(setup, accumulate=1))
        recorder.start_step()
        train(engine, setup)
        return Recording(tuple(recorder.events), recorder.peak)
