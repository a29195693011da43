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
    peak     16Ψ/N + R + 4U - (R + 2U)/N, for a root of R bytes, equal units of U bytes and prefetch 1; and activations
    sent     Ψ all-gather in forward + Ψ all-gather in backward + Ψ reduce-scatter = 3Ψ (DDP: 2Ψ)

At the peak, late in backward, these are alive beside the shards: the root (R), the unit at work and the one prefetched
(2U), and whole gradients of the unit at work and of the one in flight (2U). The root, the unit at work and the one
prefetched have no gradient shard yet, so (R + 2U)/N is subtracted. (`PEAK_FORMULAS` in harness/measure/dry_run.py is
for unequal units.) The root is gathered once per step, so a little less than 3Ψ is sent.

Step 5 has moved into steps 1 and 2, and all else follows from that: the updated shard is gathered when the next forward
needs it, unit by unit. In the order of time, with prefetch 1:

    forward   gather root, 0 | embedding | gather 1 | compute 0 | free 0 | gather 2 | compute 1 | free 1 | ...
    backward  ... | gather 0 | compute 1 | free 1, reduce 1 | compute 0 | free 0, reduce 0 | reduce root, free root

A gather stands left of the computation that it hides behind: it is started first and waited for later.

Why freeing means resizing the storage. The obvious way to free a weight is `param.data = shard`. It frees little: for
its backward, `F.linear` has saved `weight.t()`, a view, and a view keeps the whole storage alive. On the article's GPT
68% of the gathered bytes were still there after a forward that freed every layer this way (./launch.sh articles --only
"has gathered"). These views are needed, too, as backward multiplies by them. So the views stay, and the memory under
them goes: `storage.resize_(0)` gives it back, and every tensor on the storage keeps its shape. Resizing it to its old
size and gathering into it fills all of them again, the model's weights and autograd's views alike. (FSDP does the
same.) Nobody may read a tensor while its storage has no bytes: that would end the process. harness/engine/guard.py
turns it into an error.

When backward needs a unit. Forward saves weights for backward, and backward asks for them when it gets there. torch's
`saved_tensors_hooks` call us both times: harness/engine/unit_hooks.py knows when to call `before_backward`.

The other words are those of zero1.py. What changes from chapter 2: ./launch.sh changes zero2 zero3

Paper: ZeRO (Rajbhandari et al., 2020), section 5.3, "P_os+g+p". Article: "AI in Multiple GPUs: ZeRO & FSDP".
Run it: ./launch.sh zero3 2
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from harness.engine import gradients, guard, meta, optimizer, order, precision, refusals, state
from harness.engine.interface import Interface
from harness.engine.placement import Placement
from harness.engine.unit_hooks import UnitHooks
from harness.engine.units import default_units, parameters_by_unit
from harness.engine.waiting import wait
from zero1 import Bucket
from zero2 import Reduction


class Unit:
    """A module whose parameters are gathered and freed together.

    As a rule it has one bucket. A buffer has one dtype, and a frozen parameter needs no gradient to be sent, so a unit
    that mixes dtypes, or frozen and trained parameters, has a bucket for each kind.
    """

    def __init__(self, name: str, module: nn.Module, named_params, *layout):
        self.name, self.module = name, module
        kinds = {}
        for param_name, param in named_params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((param_name, param))
        self.buckets = [Bucket(kind, *layout) for kind in kinds.values()]
        for bucket in self.buckets:
            bucket.label = f"unit {name!r}"  # in messages
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.params[0].requires_grad]
        self.params = [param for bucket in self.buckets for param in bucket.params]
        self.gathered = True  # its buffers have memory; what is in flight may still be missing. False: freed
        self.works = []  # its all-gathers in flight


def make_units(model: nn.Module, modules, *layout) -> tuple[list[Unit], Unit]:
    """(units, root): every parameter in exactly one of them, in the model's order. `layout` goes to `Bucket`.

    `modules` are the units' modules (None: the entries of every outermost ModuleList or Sequential). A parameter that
    several of them use (tied weights) belongs to the root.
    """
    modules = default_units(model) if modules is None else list(modules)
    held, rest = parameters_by_unit(model, modules)
    names = {module: name for name, module in model.named_modules()}
    units = [Unit(names[module], module, held[module], *layout) for module in modules if held[module]]
    return units, Unit("root", model, rest, *layout)


class ZeRO3(Interface):
    """Data-parallel training of `model` with optimizer state, gradients and parameters cut into N.

    Options and errors are those of `ZeRO1`, with units in the place of buckets. `units` are the modules to gather and
    free as one (default: see `make_units`); `prefetch` is how many units ahead to gather. With
    `reshard_after_forward=False` a unit stays gathered from forward to backward: 2Ψ are sent and not 3Ψ, and all
    parameters are gathered in between.

    Every rank must run the same units in the same order. Several backwards before a step add up: k of them send 3kΨ, or
    (2k+1)Ψ if all but the last run under `no_sync()`, which keeps whole gradients, 4Ψ bytes. A model on the device
    `meta` has no memory yet. It gets its memory unit by unit, and its values by `init_fn(name, tensor)`, which fills
    each parameter and buffer in place, or from `state_dict`.

    Raises RuntimeError also when a freed weight is used. Source: ZeRO paper, section 5.3; article class `ZeRO_3`.
    """

    # The moves.

    def _gather(self, unit: Unit) -> None:
        """Step 5, first half: start to gather `unit`. Nobody may use it before `_wait`."""
        if unit.gathered:
            return
        # An error if another rank gathers another unit: ranks compare a checksum where this step differs from the last.
        self.order.next("all-gather", unit)
        with record_function("step 5 gather parameters"):
            for bucket in unit.buckets:
                # On a GPU work runs in queues, called streams, and collectives have a stream of their own. The stream
                # that computes frees this memory later, so it also allocates it here. Then the two need no signal.
                bucket.flat.untyped_storage().resize_(bucket.numel * bucket.flat.element_size())
                # Straight into the weights: the model's parameters are views of `flat`, and so is what autograd saved.
                whole = precision.sendable(bucket.flat)  # `bucket.flat` itself, or its bytes
                with self.placement.copies_beside():  # offload only: a stream of its own for the copy up
                    shard = precision.rounded_shard(bucket)  # in float32 `bucket.shard` itself
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

    # The moments, in the order of time. The root has all but `after_forward`: it is gathered first and freed
    # last. There is no queue as in ZeRO-2: every rank runs the units in the same order, and `order` watches over that.

    def before_forward(self, unit: Unit, upcoming: list[Unit]) -> None:
        """`unit` is about to run. `upcoming` are the `prefetch` units that ran next in the last forward."""
        self._gather(unit)  # nothing to do if it was prefetched
        for following in upcoming:
            self._gather(following)
        self._wait(unit)

    def after_forward(self, unit: Unit) -> None:
        """`unit` has run, and backward will come back to it."""
        if self.reshard_after_forward:
            self._free(unit)

    def before_backward(self, unit: Unit, upcoming: list[Unit]) -> None:
        """Backward asks for a weight of `unit`. `upcoming` are the `prefetch` units that ran before it in forward."""
        self._gather(unit)
        for following in upcoming:
            self._gather(following)
        self._wait(unit)

    def after_backward(self, unit: Unit) -> None:
        """Nobody will ask for the weights of `unit` any more."""
        self._free(unit)

    def gradients_final(self, unit: Unit) -> None:
        """All gradients of `unit` are final."""
        self.order.next("reduce-scatter", unit)
        for bucket in unit.trained_buckets:
            self._send(bucket)

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
        """The end of step 3: receive the last bucket."""
        self._receive()
        gradients.require_all(self)  # an error for a parameter without a gradient

    def _free_all(self) -> None:
        for unit in (*self.units, self.root):
            self._free(unit)

    _shards_changed = _free_all  # new values were loaded into all shards: what is gathered has the old ones

    def zero_grad(self) -> None:
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        self._receive()  # a buffer must not go while a collective uses it
        gradients.forget(self)

    # The set-up.

    def __init__(self, model: nn.Module, optimizer_cls, *, group=None, units=None, prefetch: int = 1,
                 reshard_after_forward: bool = True, param_groups=None, param_dtype=None, reduce_dtype=None,
                 find_unused: bool = False, offload_policy=None, init_fn=None, state_dict=None):  # fmt: skip
        units = list(units) if isinstance(units, Iterable) else units
        place, self.dtypes = Placement(group, offload_policy), (param_dtype, reduce_dtype)
        # What cannot work raises here, on every rank, and before anything is changed.
        refusals.check(
            model, optimizer_cls, param_groups, place, self.dtypes, find_unused, (init_fn, state_dict),
            units=units, prefetch=prefetch, reshard_after_forward=reshard_after_forward,
        )  # fmt: skip
        self.model, self.group, self.placement, self.find_unused = model, place.group, place, find_unused
        self.reshard_after_forward = reshard_after_forward
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.prefetch = prefetch if self.world_size > 1 else 0  # a rank that is alone waits for nothing
        self.order = order.Sequence(place.everyone)  # do all ranks gather and reduce the same units in the same order?
        with record_function("step 0 partition"), torch.no_grad():
            self.units, self.root = make_units(model, units, self.rank, self.world_size, self.dtypes)
            self.buckets = [bucket for unit in (*self.units, self.root) for bucket in unit.buckets]
            self.trained_buckets = [bucket for unit in (*self.units, self.root) for bucket in unit.trained_buckets]
            source = meta.Source(model, place.everyone, init_fn, state_dict)  # of the values, for a model on `meta`
            for unit in (*self.units, self.root):
                for bucket in unit.buckets:
                    self._shard(bucket, source)
                self._free(unit)  # the memory is gone already; now it counts as freed
            source.finish()
            state.broadcast_buffers(model, place.everyone)  # what the model has registered as buffers stays whole
        self.optimizer = optimizer.over_pieces(self, optimizer_cls, param_groups)
        self._in_flight = None  # the `Reduction` that was sent and not received
        self.hooks = UnitHooks(self)  # from here on the model's forward and backward call the moments
        self.zero_grad()

    def _shard(self, bucket: Bucket, source: meta.Source) -> None:
        """Step 0 of one bucket: flatten it, and keep this rank's shard alone."""
        on_meta = source.begin(bucket)  # parameters on `meta` get a device here, memory in `flatten`
        bucket.flatten()
        source.fill(on_meta)  # and their values here
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
