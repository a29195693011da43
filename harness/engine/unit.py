"""ZeRO-3's unit in an engine: one bucket as a rule, and one per kind where it mixes dtypes, or frozen and trained."""

from torch import nn
from torch.profiler import record_function

from harness.engine.bucket import EngineBucket
from harness.engine.safety import guard
from harness.engine.units import default_units, parameters_by_unit


class EngineUnit:
    """A module whose parameters are gathered and freed together."""

    def __init__(self, name: str, module: nn.Module, named_params, engine, source):
        self.name, self.module = name, module
        self.placement = engine.placement
        self.order = engine.order  # an error if another rank gathers another unit
        kinds = {}
        for param_name, param in named_params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((param_name, param))
        self.buckets = []
        for kind in kinds.values():
            self.buckets.append(EngineBucket(kind, engine.placement, engine.dtypes, sharded=True, source=source))
            self.buckets[-1].label = f"unit {name!r}"
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.trained]
        self.params, self.pieces = [], []
        for bucket in self.buckets:
            self.params += bucket.params
            self.pieces += bucket.pieces
        self.pending = 0  # how many gradients of its inputs this backward has still to finish
        self.told = False  # whether there are such gradients in this backward
        self.works = []  # its all-gathers in flight
        self.gathered = False  # whether its buffers have memory; what is in flight may still be missing

    @property
    def missing(self) -> bool:
        """Whether a gradient has still to come in this backward."""
        return any(bucket.missing for bucket in self.trained_buckets)

    def start_gather(self) -> None:
        """Step 5, first half. Nobody may use the unit before `wait`."""
        if self.gathered:
            return
        self.order.next("all-gather", self)
        with record_function("step 5 gather parameters"):
            for bucket in self.buckets:
                # On a GPU work runs in queues, called streams, and collectives have their own. The stream that computes
                # frees this memory later, so it allocates it, too: the allocator can reuse it without a signal.
                bucket.flat.untyped_storage().resize_(bucket.numel * bucket.flat.element_size())
                with self.placement.copies_beside():  # offload only: a stream of its own for copies from the host
                    self.works.append(bucket.gather())
        self.gathered = True

    def wait(self) -> None:
        """Step 5, second half: from here on the unit may compute."""
        if self.works:
            while self.works:
                self.works.pop(0).wait()
            guard.open(self.params)  # using them was an error up to here

    def free(self) -> None:
        """Give back the memory of the gathered parameters. This rank's shard stays."""
        if not self.gathered:
            return
        self.wait()  # never free a buffer that a collective still writes to
        for bucket in self.buckets:
            bucket.flat.untyped_storage().resize_(0)
        self.gathered = False
        guard.close(self.params)  # using them is an error from here on


def make_units(engine, modules, source) -> tuple[list[EngineUnit], EngineUnit]:
    """(units, root): every parameter is in exactly one of them. One that several units use belongs to the root."""
    modules = default_units(engine.model) if modules is None else modules
    held, rest = parameters_by_unit(engine.model, modules)
    names = {module: name for name, module in engine.model.named_modules()}
    units = [EngineUnit(names[each], each, held[each], engine, source) for each in modules if held[each]]
    return units, EngineUnit("root", engine.model, rest, engine, source)
