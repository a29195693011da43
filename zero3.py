"""ZeRO-3: every rank keeps 1/N of the parameters too.

At any moment a model computes in one layer, so only this layer's parameters must be there. ZeRO-3 cuts the model into
**units**, a transformer block each. A unit is **gathered** right before its forward: an all-gather brings all of its
parameters to every rank. Right after forward it is **freed**: the gathered buffer gives its memory back, and each rank
keeps its shard, which has memory of its own. Backward does both once more.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [##      ]   [  ##    ]   [    ##  ]   [      ##]
    gradients        [##      ]   [  ##    ]   [    ##  ]   [      ##]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

What belongs to no unit (embedding, last norm, head) is the **root**. It stays gathered from the start of forward to its
last gradient. **Prefetch** means to start the all-gather of the next unit before the present one computes.

Per rank, in bytes (float32 and AdamW, one backward per step), and sent per step, in elements:

    memory   4Ψ/N parameters + 4Ψ/N gradients + 8Ψ/N optimizer state     (7e9 parameters, N = 8: 14 GB)
    peak     16Ψ/N + R + H + 4U - (R + 2U)/N (R, U: bytes of root, equal units; H: below); no activations, prefetch 1
    sent     Ψ all-gather in forward + Ψ all-gather in backward + Ψ reduce-scatter = 3Ψ (DDP: 2Ψ)

Late in backward these are alive beside the shards: the root (R), the unit at work and the one prefetched (2U), and the
gradients of the unit at work and of the one in flight (2U), whole. Root, the unit at work and the one prefetched have
no gradient shard yet, so (R + 2U)/N is subtracted. The root's first gradients (H: last norm, head) stay whole until the
embedding's has come: then 16Ψ/N + 2R + U - R/N are alive, more if R - H > 3U - 2U/N. The root is gathered once per
step, so a little less than 3Ψ is sent.

Step 5 has moved into steps 1 and 2, and all else follows from that: the updated shard is gathered when the next forward
needs it, unit by unit. In the order of time, for three units and prefetch 1, and under it what is gathered:

    forward   gather root, 0 | embed | gather 1 | compute 0 | free 0 | gather 2 | compute 1 | free 1 | compute 2, free 2
              R + U            R + U   R + 2U     R + 2U      R + U    R + 2U     R + 2U      R + U    R + U       R
    backward  gather 2 | head  | gather 1 | compute 2 | free 2, reduce 2 | ... | compute 0 | free 0, reduce 0, root
              R + U      R + U   R + 2U     R + 2U      R + U                    R + U       R                  R

A gather is started before the computation that hides it, and waited for after. The last unit is freed although backward
soon gathers it again: head and loss come in between, whose activations are among the largest.

Why freeing means resizing the storage. The obvious way to free a weight is `param.data = shard`. It frees little: for
its backward, `F.linear` has saved `weight.t()`, a view, and a view keeps the whole storage alive. Of 8 linear layers
7/8 of the gathered bytes stayed (all but the first, whose input needs no gradient). Backward multiplies by these views.
So they stay, and the memory under them goes: `storage.resize_(0)` gives it back, and every tensor on it keeps its
shape. Resized to its old size and gathered into, the storage fills all of them again. FSDP2 resizes, too. To read a
tensor that has no bytes raises an error or crashes the process: harness/engine/safety/guard.py makes it an error.

The other words are those of zero1.py. What changes from chapter 2: ./launch.sh changes zero2 zero3
Paper: ZeRO (Rajbhandari et al., 2020), sections 5.3 "P_os+g+p" (memory) and 7 (traffic). Article: "AI in Multiple GPUs:
ZeRO & FSDP", class `ZeRO_3`. Run it: ./launch.sh zero3 2
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from zero1 import Bucket, over_pieces, share_the_rest
from zero2 import Reduction


class Unit(Bucket):
    """A module whose parameters are gathered and freed together: a bucket whose `flat` has memory at times only."""

    def __init__(self, name, module, named_params, group):
        dtypes = {param.dtype for _, param in named_params}
        if len(dtypes) > 1:
            raise ValueError(f"unit {name!r} has parameters of {dtypes}: pass units= of one dtype, or take ZeRO3Engine")
        super().__init__(named_params, group)
        self.name = name
        self.module = module
        self.shard = self.shard.clone()  # so far a view of `flat`; it must survive when `flat` is freed
        self.pieces = self.make_pieces()
        self.following = []  # units to gather with it in forward: those that run next
        self.preceding = []  # units to gather with it in backward
        self.work = None  # its all-gather in flight
        self.gathered = True  # `flat` has memory, which `work` may still have to fill
        self.free()

    def start_gather(self):
        """Step 5, first half. Nobody may use the unit before `wait`."""
        if not self.gathered:
            with record_function("step 5 gather parameters"):
                self.flat.untyped_storage().resize_(self.flat.nbytes)
                self.work = self.gather()
            self.gathered = True

    def wait(self):
        """Step 5, second half: from here on the unit may compute."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def free(self):
        """Give back the memory of the gathered parameters. This rank's shard stays."""
        if self.gathered:
            self.wait()  # never free a buffer that a collective still writes into
            self.flat.untyped_storage().resize_(0)
            self.gathered = False


def default_units(module):
    """The modules that become units: the entries of every outermost ModuleList or Sequential."""
    found = []
    for child in module.children():
        is_entry = isinstance(module, (nn.ModuleList, nn.Sequential))
        if is_entry and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # those are never called themselves
            found.append(child)
        else:
            found += default_units(child)
    return found


def make_units(model, modules, group):
    """(units, root or None): every trained parameter is in exactly one. One that several units use is the root's."""
    modules = dict.fromkeys(default_units(model) if modules is None else modules)  # each once
    units_of = {}  # parameter -> the units that use it; None stands for what lies in no unit
    inside = {}  # module -> the units in which it lies
    for unit in modules:
        for module in unit.modules():
            inside.setdefault(module, []).append(unit)
    for module in model.modules():
        for param in module.parameters(recurse=False):
            units_of.setdefault(param, set()).update(inside.get(module, [None]))
    held = {module: [] for module in (None, *modules)}
    for name, param in model.named_parameters():
        users = units_of[param]
        home = users.pop() if len(users) == 1 else None
        if param.requires_grad:
            held[home].append((name, param))
    units = []
    names = {module: name for name, module in model.named_modules()}
    for module in modules:
        if held[module]:
            units.append(Unit(names[module], module, held[module], group))
    root = None
    if held[None]:
        root = Unit("root", model, held[None], group)
    return units, root


def line_up(units, root, prefetch):
    """Prefetch: who is gathered with whom. The root brings the first units in forward, the last ones in backward."""
    for index, unit in enumerate(units):
        unit.following = units[index + 1 : index + 1 + prefetch]
        before = units[max(0, index - prefetch) : index]
        unit.preceding = before[::-1]
    if root is not None:
        root.following = units[:prefetch]
        root.preceding = units[::-1][:prefetch]


class ZeRO3:
    """Data-parallel training of `model` with optimizer state, gradients and parameters cut into N.

    Arguments are ZeRO-1's, with `units`, the modules to gather and free as one (default: `default_units`), in the place
    of buckets, as they run. `prefetch` is how many units ahead to gather. Call the engine, not the model. k backwards
    before a step send 3kΨ. What it cannot see, beside ZeRO-1's list: ranks that run units in different orders; a part
    of a unit that is recomputed alone, or by a reentrant checkpoint; weights outside their unit's forward (in the loss,
    returned, kept) or changed in it; gradients taken in forward, or through a backward. `ZeRO3Engine` can, or refuses.
    """

    def __init__(self, model, optimizer_cls, *, units=None, prefetch=1, group=None):
        self.model = model
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.prefetch = prefetch if self.world_size > 1 else 0  # a rank that is alone waits for nothing
        self.units, self.root, self.unit_of = self.partition(units)
        self.all_units = [*self.units, *filter(None, [self.root])]
        self.optimizer = over_pieces(optimizer_cls, self.all_units)
        self.in_flight = None  # the `Reduction` that was sent and not received
        self.backward_number = -1  # autograd's number of the backward that was noticed last
        self.watch_forward()
        self.watch_gradients()
        self.zero_grad()

    def partition(self, units):
        """Step 0: who owns what."""
        with record_function("step 0 partition"), torch.no_grad():
            units, root = make_units(self.model, units, self.group)
            line_up(units, root, self.prefetch)
            share_the_rest(self.model, self.group)
        unit_of = {storage_of(unit.flat): unit for unit in (*units, root) if unit is not None}
        return units, root, unit_of

    def __call__(self, *args, **kwargs):
        # Forward saves tensors for backward, weights among them, and backward asks for each when it gets there.
        with saved_tensors_hooks(self.pack, self.unpack):
            output = self.model(*args, **kwargs)
        if not torch.is_grad_enabled():  # an evaluation: no backward will free the root
            self.free_all()
        return output

    def training_step(self, inputs, targets, loss_fn):
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)  # and step 5 inside it, unit by unit
        with record_function("step 2 backward"):
            loss.backward()  # and steps 5 and 3 inside it, unit by unit
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self):
        """The end of step 3, and step 4. There is no step 5: the next forward gathers what it needs."""
        with record_function("step 3 reduce gradients"):
            self.reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        self.free_all()  # what is still gathered has the old values

    def reduce_gradients(self):
        """Only a check is left: were all units sent? The last one was received at the end of backward."""
        for unit in self.all_units:
            unit.require_gradients()

    def zero_grad(self):
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        self.receive()  # else the next step would receive it, and add it
        self.begin_backward()
        for unit in self.all_units:
            unit.drop_gradients()

    # The moments of forward.

    def watch_forward(self):
        """Set up once: torch calls these right before a unit's forward, and right after. The root is freed later."""
        for unit in self.all_units:
            unit.module.register_forward_pre_hook(partial(self.before_forward, unit), prepend=True)  # before the user's
        for unit in self.units:
            unit.module.register_forward_hook(partial(self.after_forward, unit))

    def before_forward(self, unit, module, inputs):
        if in_backward():  # recomputation: backward runs the unit's forward once more
            return self.before_backward(unit)
        for each in (unit, *unit.following):
            each.start_gather()
        unit.wait()

    def after_forward(self, unit, module, inputs, output):
        if in_backward():
            return  # a recomputed unit stays: its own backward comes now
        unit.free()
        if isinstance(output, torch.Tensor) and output.requires_grad:  # its gradient comes when backward gets here
            output.register_hook(lambda gradient: self.before_backward(unit))

    # The moments of backward.

    def pack(self, tensor):
        """Autograd calls this when forward saves `tensor`, and keeps what it returns.

        That is not the tensor itself: an operation that keeps its own result would keep itself alive, for ever.
        """
        unit = self.unit_of.get(storage_of(tensor))  # whose weight is it, or a view of? None: nobody's
        return unit, tensor.detach(), tensor._version

    def unpack(self, saved):
        """Autograd calls this in backward, right before it reads a tensor that `pack` has seen."""
        unit, tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(f"a saved tensor of shape {tuple(tensor.shape)} was changed in place before backward")
        if unit is not None:
            self.before_backward(unit)
        return tensor

    def before_backward(self, unit):
        """Backward has come to `unit`: its output's gradient is there, a weight is asked for, or it runs again.

        The unit before it in forward is next. The first weight asked for is the root's, the head's: then the last unit
        is gathered while the head computes.
        """
        self.notice_backward()
        unit.start_gather()
        for each in unit.preceding:
            if each.missing:  # else backward has been there already
                each.start_gather()
        unit.wait()

    def notice_backward(self):
        """Called at everything that backward does: the first time it has just begun."""
        number = torch._C._current_graph_task_id()
        if self.backward_number != number:
            self.backward_number = number
            self.begin_backward()
            Variable._execution_engine.queue_callback(self.end_backward)  # autograd calls it when all is done

    def begin_backward(self):
        """All gradients are still to come."""
        for unit in self.all_units:
            unit.missing = set(range(len(unit.params)))

    def watch_gradients(self):
        """Set up once: autograd calls `on_gradient` whenever it has finished a `param.grad`."""
        for unit in self.all_units:
            unit.watch(self.on_gradient)

    def on_gradient(self, unit, index, param):
        """Inside step 2: `param.grad` is finished. With its last one a unit is done. (If not, `unpack` gathers again.)

        No turns as in ZeRO-2: units are gathered in the order of computation, so all ranks must have the same anyway.
        """
        self.notice_backward()
        unit.missing.remove(index)
        if not unit.missing:
            unit.free()
            self.send(unit)  # `Reduction` needs only the size of `flat`, not its memory

    def end_backward(self):
        """Nothing is asked for any more. Normally one reduction is left to receive, the root's, and no unit to free."""
        self.receive()
        self.free_all()

    def free_all(self):
        for unit in self.all_units:
            unit.free()

    def send(self, unit):
        """Step 3, first half, as in ZeRO-2: receive the unit before, then send this one."""
        with record_function("step 3 reduce gradients"):
            self.receive()
            self.in_flight = Reduction(unit)

    def receive(self):
        """Step 3, second half: receive the unit in flight, if there is one."""
        if self.in_flight is not None:
            self.in_flight.finish()
            self.in_flight = None


def storage_of(tensor):
    """The same for all views of one storage, with memory or without."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return None  # a sparse tensor has several


def in_backward():
    return torch._C._current_graph_task_id() != -1


# Without `clone` a shard would lie in the memory that is freed. Without `wait` a unit computes with whatever is there.
# Without `free` in `on_gradient` all units would be whole at the end of backward. Without `free_all` in `step` the next
# forward would find the root gathered, if a forward without backward has left it so, and use the weights of before.


def main():
    from harness.measure import walkthrough

    walkthrough.run(ZeRO3, __doc__)


if __name__ == "__main__":
    main()
