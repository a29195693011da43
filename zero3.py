"""ZeRO-3: every rank keeps 1/N of the parameters too.

At any moment a model computes in one layer, so only this layer's parameters must be there. ZeRO-3 cuts the model into
**units**, a transformer block each. A unit is **gathered** right before its forward: an all-gather brings all of its
parameters to every rank. Right after forward it is **freed**: the gathered buffer gives its memory back, and each rank
keeps its shard, which has memory of its own. Backward does both once more.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [##      ]   [  ##    ]   [    ##  ]   [      ##]
    gradients        [##      ]   [  ##    ]   [    ##  ]   [      ##]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

What belongs to no unit (embedding, last norm, head) is the **root**. It stays gathered from the start of forward to the
end of backward. **Prefetch** means to start the all-gather of the next unit before the present one computes.

Per rank, in bytes (float32 and AdamW), and sent per step, in elements:

    memory   4Ψ/N parameters + 4Ψ/N gradients + 8Ψ/N optimizer state     (7e9 parameters, N = 8: 14 GB)
    peak     16Ψ/N + R + 4U - (R + 2U)/N (R, U: bytes of root, equal units); no activations, late in backward
    sent     Ψ all-gather in forward + Ψ all-gather in backward + Ψ reduce-scatter = 3Ψ (DDP: 2Ψ)

At that moment these are alive beside the shards: the root (R), the unit at work and the one prefetched (2U), and whole
gradients of the unit at work and of the one in flight (2U). Root and these two units have no gradient shard yet, so
(R + 2U)/N is subtracted. Not counted are the root's own gradients (last norm, head), which stay whole until the
embedding's has come. (Unequal units: `PEAK_FORMULAS` in harness/measure/memory.py.) With activations the peak comes
early in backward as a rule. The root is gathered once per step, so a little less than 3Ψ is sent.

Step 5 has moved into steps 1 and 2, and all else follows from that: the updated shard is gathered when the next forward
needs it, unit by unit. In the order of time, with prefetch 1, and under it the bytes that are gathered:

    forward   gather root, 0 | embedding | gather 1 | compute 0 | free 0 | gather 2 | compute 1 | free 1 | ...
              R + U            R + U       R + 2U     R + 2U      R + U    R + 2U     R + 2U      R + U
    backward  ... | gather 0 | compute 1 | free 1, reduce 1 | compute 0 | free 0, reduce 0 | embed | free, reduce root
                    R + 2U     R + 2U      R + U              R + U       R                  R       0

A gather stands left of the computation that it hides behind: it is started first and waited for later. The last unit is
freed although backward soon gathers it again: head and loss come in between, whose activations are among the largest.
On a CPU a missing wait can leave every number right. On simulated GPUs (tests/simulated_gpu/) a detector names both
operations and their streams, as the answer to such a bug shows: ./launch.sh bug 33 --answer.

Why freeing means resizing the storage. The obvious way to free a weight is `param.data = shard`. It frees little: for
its backward, `F.linear` has saved `weight.t()`, a view, and a view keeps the whole storage alive. Of 8 linear layers
7/8 of the gathered bytes stayed (./launch.sh articles --only "has gathered"). Backward multiplies by these views. So
they stay, and the memory under them goes: `storage.resize_(0)` gives it back, and every tensor on it keeps its shape.
Resized to its old size and gathered into, the storage fills all of them again. FSDP does so, too. To read a tensor that
has no bytes would crash the process: harness/engine/guard.py makes it an error.

The other words are those of zero1.py. What changes from chapter 2: ./launch.sh changes zero2 zero3
Paper: ZeRO (Rajbhandari et al., 2020), sections 5.3 "P_os+g+p" (memory) and 7 (traffic). Article: "AI in Multiple GPUs:
ZeRO & FSDP", class `ZeRO_3`. Run it: ./launch.sh zero3 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from harness.engine import gradients, guard, meta, optimizer, order, precision, state
from harness.engine.interface import Interface
from harness.engine.unit_hooks import UnitHooks, storage_number
from harness.engine.units import default_units, parameters_by_unit
from harness.engine.waiting import wait
from zero1 import Bucket
from zero2 import Reduction


class Unit:
    """A module whose parameters are gathered and freed together.

    It has one bucket as a rule, and one per kind if it mixes dtypes, or frozen and trained parameters.
    """

    def __init__(self, name: str, module: nn.Module, named_params, rank: int, world_size: int, dtypes):
        self.name, self.module = name, module
        kinds = {}
        for param_name, param in named_params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((param_name, param))
        self.buckets = [Bucket(kind, rank, world_size, dtypes) for kind in kinds.values()]
        for bucket in self.buckets:
            bucket.label = f"unit {name!r}"  # in messages
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.params[0].requires_grad]
        self.params = [param for bucket in self.buckets for param in bucket.params]
        self.gathered = True  # its buffers have memory; what is in flight may still be missing. False: freed
        self.works = []  # its all-gathers in flight


def make_units(model: nn.Module, modules, rank: int, world_size: int, dtypes) -> tuple[list[Unit], Unit]:
    """(units, root): every parameter is in exactly one of them. One that several units use belongs to the root.

    `modules` are the units' modules (None: the entries of every outermost ModuleList or Sequential).
    """
    modules = default_units(model) if modules is None else list(modules)
    held, rest = parameters_by_unit(model, modules)
    names = {module: name for name, module in model.named_modules()}
    units = [Unit(names[each], each, held[each], rank, world_size, dtypes) for each in modules if held[each]]
    return units, Unit("root", model, rest, rank, world_size, dtypes)


class ZeRO3(Interface):
    """Data-parallel training of `model` with optimizer state, gradients and parameters cut into N.

    Step 0, the set-up of all that the other steps use, stands last: `__init__`. Options are ZeRO-1's, with `units` in
    the place of buckets: the modules to gather and free as one (default: see `make_units`). `prefetch` is how many
    units ahead to gather. With `reshard_after_forward=False` a unit stays gathered from forward to backward: 2Ψ are
    sent and not 3Ψ, and all parameters are gathered in between.
    With k backwards before a step a rank sends 3kΨ, or (2k+1)Ψ if all but the last run under `no_sync()`, which keeps
    whole gradients, 4Ψ bytes. A model on torch's device `meta` has shapes and no memory. It gets its memory unit by
    unit, and its values by `init_fn(name, tensor)`, which fills a tensor in place, or from `state_dict`.
    """

    # The steps.

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)  # and step 5 inside it, unit by unit
        with record_function("step 2 backward"):
            loss.backward()  # and steps 5 and 3 inside it, unit by unit
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self) -> None:
        """The end of step 3, and step 4. There is no step 5: the next forward gathers what it needs."""
        with record_function("step 3 reduce gradients"):
            self._reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        self._free_all()  # what is still gathered has the old values

    def _reduce_gradients(self) -> None:
        """The end of step 3. Normally nothing is left: at the end of backward `self.hooks` has called `_receive`."""
        self._receive()  # what a backward that stopped short has left in flight
        gradients.require_all(self)  # without `find_unused` an error for a parameter that got no gradient

    def zero_grad(self) -> None:
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        self._receive()  # else the next step would receive it, and add it
        gradients.forget(self)

    # The moments of forward. Hooks on modules call them, the second one for units only: the root stays gathered.

    def before_forward(self, unit: Unit, upcoming: list[Unit]) -> None:
        """`unit` is about to run. `upcoming`: the `prefetch` units that came after it in the last forward, if any."""
        for each in (unit, *upcoming):
            self._gather(each)  # nothing to do if it was prefetched
        self._wait(unit)

    def after_forward(self, unit: Unit) -> None:
        """`unit` has run, and backward will come back to it."""
        if self.reshard_after_forward:
            self._free(unit)

    # The moments of backward. Forward saves tensors for backward, weights among them, and backward asks for each when
    # it gets there. `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` shows both. (The article has backward
    # hooks on modules: they miss what does not pass through a module's output.) A unit is done with its last gradient.

    def pack(self, tensor: torch.Tensor):
        """`self.hooks` has autograd call this when forward saves `tensor`, and keep what it returns."""
        unit = self.unit_of.get(storage_number(tensor))  # whose weight is it, or a view of? None: nobody's
        return tensor, (None if unit is None else self.hooks.visit(unit))  # `visit`: this run of the unit

    def unpack(self, saved) -> torch.Tensor:
        """`self.hooks` calls this in backward, right before autograd reads a tensor that `pack` has seen."""
        tensor, visit = saved
        if visit is not None and visit not in self.asked:  # `self.hooks` empties `asked` for each backward
            self.asked.add(visit)  # it asks for the unit's first weight: it has come to the unit
            self.before_backward(visit.unit, visit.before)  # `before`: the `prefetch` units that ran before it
        return tensor

    def before_backward(self, unit: Unit, upcoming: list[Unit]) -> None:
        """Backward asks for a weight of `unit`. `upcoming` are the `prefetch` units that ran before it in forward."""
        for each in (unit, *upcoming):
            self._gather(each)
        self._wait(unit)

    def watch_gradients(self) -> None:
        """Set up once: autograd calls a parameter's hook, and that `on_gradient`, whenever its gradient is finished."""
        for unit in (*self.units, self.root):
            for bucket in unit.trained_buckets:
                for index, param in enumerate(bucket.params):
                    param.register_post_accumulate_grad_hook(self.hooks.calling(self.on_gradient, unit, bucket, index))

    def on_gradient(self, unit: Unit, bucket: Bucket, index: int) -> None:
        """The gradient of `bucket.params[index]` is final: all that backward does with the weight is done."""
        bucket.missing.discard(index)  # as in ZeRO-2
        if not any(bucket.missing for bucket in unit.trained_buckets):  # the unit's last one
            if len(unit.trained_buckets) == len(unit.buckets):  # frozen ones tell nothing: `self.hooks` does it, later
                self.after_backward(unit)
            self.gradients_final(unit)

    def after_backward(self, unit: Unit) -> None:
        """Nobody will ask for the weights of `unit` any more."""
        self._free(unit)

    def gradients_final(self, unit: Unit) -> None:
        """All gradients of `unit` are final. No turns as in ZeRO-2: units are done in the order of gathers."""
        self.order.next("reduce-scatter", unit)  # an error if the ranks' orders differ
        for bucket in unit.trained_buckets:
            self._send(bucket)  # `Reduction` needs only the size of `flat`, which may be freed

    # The moves.

    def _gather(self, unit: Unit) -> None:
        """Step 5, first half: start to gather `unit`. Nobody may use it before `_wait`."""
        if unit.gathered:
            return
        self.order.next("all-gather", unit)  # an error if another rank gathers another unit
        with record_function("step 5 gather parameters"):
            for bucket in unit.buckets:
                # On a GPU work runs in queues, called streams, and collectives have their own. The stream that computes
                # frees this memory later, so it allocates it, too: the allocator can reuse it without a signal.
                bucket.flat.untyped_storage().resize_(bucket.numel * bucket.flat.element_size())
                with self.placement.copies_beside():  # offload only: a stream of its own for copies from the host
                    whole, shard = precision.sendable(bucket.flat), precision.rounded_shard(bucket)  # as in ZeRO-1
                    # Straight into the weights: the model's parameters are views of `flat`, so is what autograd saved.
                    unit.works.append(dist.all_gather_single(whole, shard, group=self.group, async_op=True))
        unit.gathered = True

    def _wait(self, unit: Unit) -> None:
        """Step 5, second half: from here on `unit` may compute."""
        if unit.works:
            while unit.works:
                wait(unit.works.pop(0), "all-gather", unit.buckets[0])
            guard.open(unit.params)  # using them was an error up to here

    def _free(self, unit: Unit) -> None:
        """Give back the memory of the gathered parameters. This rank's shard stays."""
        if not unit.gathered:
            return
        self._wait(unit)  # never free a buffer that a collective still writes to
        for bucket in unit.buckets:
            bucket.flat.untyped_storage().resize_(0)
        unit.gathered = False
        guard.close(unit.params)  # using them is an error from here on

    def _free_all(self) -> None:
        for unit in (*self.units, self.root):
            self._free(unit)

    _shards_changed = _free_all  # new values were loaded into all shards: what is gathered has the old ones

    def _send(self, bucket: Bucket) -> None:
        """Step 3, first half, as in ZeRO-2: receive the bucket before, then send this one."""
        with record_function("step 3 reduce gradients"):
            self._receive()
            self._in_flight = Reduction(bucket, self.group)

    def _receive(self) -> None:
        """Step 3, second half: receive the bucket in flight, if there is one."""
        if self._in_flight is not None:
            self._in_flight.finish(self.world_size)
            self._in_flight = None

    # The set-up.

    def __init__(self, model: nn.Module, optimizer_cls, *, units=None, prefetch: int = 1, param_groups=None,
                 reshard_after_forward: bool = True, init_fn=None, state_dict=None, **options):  # fmt: skip
        own = {"units": units, "prefetch": prefetch, "reshard_after_forward": reshard_after_forward}
        # What cannot work raises here, on every rank, before anything is changed. Sets `rank`, `world_size`, `group`.
        self.prepare(model, optimizer_cls, param_groups, own, (init_fn, state_dict), **options)
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch if self.world_size > 1 else 0  # a rank that is alone waits for nothing
        self.order = order.Sequence(self.placement.everyone)  # where a step differs from the last, ranks compare theirs
        with record_function("step 0 partition"), torch.no_grad():
            self.units, self.root = make_units(model, own["units"], self.rank, self.world_size, self.dtypes)
            self.buckets = [bucket for unit in (*self.units, self.root) for bucket in unit.buckets]
            self.trained_buckets = [bucket for bucket in self.buckets if bucket.params[0].requires_grad]
            source = meta.Source(model, self.placement.everyone, init_fn, state_dict)  # of the values, if on `meta`
            for unit in (*self.units, self.root):
                for bucket in unit.buckets:
                    self._shard(bucket, source)
                self._free(unit)  # the memory is gone already; now it counts as freed
            source.finish()
            state.broadcast_buffers(model, self.placement.everyone)  # what the model registered as buffers stays whole
        self.optimizer = optimizer.over_pieces(self, optimizer_cls, param_groups)
        self._in_flight = None  # the `Reduction` that was sent and not received
        self.unit_of = {storage_number(b.flat): unit for unit in (*self.units, self.root) for b in unit.buckets}
        self.hooks = UnitHooks(self)  # calls the moments of forward, `pack` and `unpack`, and knows the hard cases
        self.watch_gradients()
        self.zero_grad()

    def _shard(self, bucket: Bucket, source: meta.Source) -> None:
        """Step 0 of one bucket: flatten it, and keep this rank's shard alone."""
        source.flatten(bucket)  # `bucket.flatten()`, and values for parameters on `meta`
        dist.broadcast(precision.sendable(bucket.flat), group_src=0, group=self.placement.everyone)
        bucket.shard = bucket.shard.clone()  # so far a view of `flat`; it must survive when `flat` is freed
        bucket.flat.untyped_storage().resize_(0)
        bucket.make_pieces(self.placement)
        guard.adopt(bucket, self)  # from here on a wrong use of the parameters is an error


def main() -> None:
    from harness.measure import walkthrough

    walkthrough.run(ZeRO3, __doc__)


if __name__ == "__main__":
    main()
