"""ZeRO-3: every rank keeps 1/N of the parameters too.

At any moment a model computes in one layer, so only this layer's parameters have to be whole. ZeRO-3 cuts the model
into units, for example one per transformer block. Right before a unit computes, an all-gather brings all of its
parameters to every rank: the unit is gathered. Right after its forward it is freed: the memory is given back, and each
rank keeps its shard. In backward each unit is gathered and freed again. The parameters outside of all units (embedding,
last norm, head) are the root. It stays gathered from the start of forward until backward has finished the last of its
gradients. With prefetch, the gather of the next unit is started before a unit computes, so that communication and
computation overlap.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [##      ]   [  ##    ]   [    ##  ]   [      ##]
    gradients        [##      ]   [  ##    ]   [    ##  ]   [      ##]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

Steps: 0 partition, 1 forward, 2 backward, 4 update. Step 5 (gather) happens inside forward and backward, and step 3
(reduce) happens inside backward. The next forward gathers the updated shards. These are the events for three units with
`prefetch=1`. The line below the events shows what is gathered after each of them (R: root, U: a unit):

    forward  gather root, 0 | embed | gather 1 | compute 0 | free 0 | gather 2 | compute 1 | free 1 | compute 2 | free 2
             R + U            R + U   R + 2U     R + 2U      R + U    R + 2U     R + 2U      R + U    R + U       R
    backward gather 2 | head  | gather 1 | compute 2 | free 2, reduce 2 | unit 1: | compute 0 | free 0, reduce 0 | embed
             R + U      R + U   R + 2U     R + 2U      R + U              the same  R + U       R                  R

In forward, the head and the loss compute after "free 2". At the end of backward, the root's weights are freed and its
gradients are reduced, and nothing is gathered any more.

Run it: torchrun --nproc-per-node 2 zero3.py --trace. It prints the same losses as zero1.py, and shows that fewer bytes
of parameters are whole at a time. In the trace, "reduce 2" appears as `send blocks.2`, after the `receive` of the unit
that was sent before. The trace does not show computation.
Paper: ZeRO, section 5.3. Article: "AI in Multiple GPUs: ZeRO & FSDP", class `ZeRO_3`.
"""

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from zero1 import Bucket, broadcast_whole, check_model, check_optimizer, main, take_over
from zero2 import Reduction, check_complete, check_gradient, weak_hook


class ZeRO3:
    """Train `model` on several ranks, each of which keeps 1/N of optimizer state, gradients and parameters.

    Arguments and use are as in `ZeRO2`, with these in place of `bucket_mb`:

    units       a list of modules, in the order in which they run. The parameters of each module are one unit. Default:
                the result of `default_units`
    prefetch    the number of next units whose gather is started before the current unit computes

    While the stage is built, every rank needs memory for the whole model. Frozen parameters stay whole. Call
    `engine(x)` and not `model(x)`. Weights cannot be read between the steps, because they are freed. The end of this
    file explains how to save.
    """

    def __init__(self, model, optimizer, *, units=None, prefetch=1, group=None):
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.check()
        self.world_size = torch.distributed.get_world_size(group)
        self.in_flight = None  # the `Reduction` that was sent and not yet received
        self.backward_id = None  # autograd's number of the last backward; see `notice_backward`
        with record_function("step 0 partition"), torch.no_grad():
            self.units = self.partition(default_units(model) if units is None else units)
            self.plan_prefetch(prefetch)
            self.take_over_optimizer()
        self.unit_of_param = {param: unit for unit in self.units for param in unit.params}
        self.unit_of_storage = {storage_of(unit.flat): unit for unit in self.units}
        self.watch_forward()
        self.watch_gradients()
        self.zero_grad()

    def __call__(self, *args, **kwargs):
        # Autograd passes each tensor that forward saves for backward through `pack`, and through `unpack` when backward
        # reads it. These tensors include weights.
        with saved_tensors_hooks(self.pack, weak_hook(self.unpack)):
            output = self.model(*args, **kwargs)
        if not torch.is_grad_enabled():  # an evaluation: no backward will free the root
            self.free_all()
        return output

    def training_step(self, inputs, targets, loss_fn):
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)  # step 5 runs inside it, unit by unit
        with record_function("step 2 backward"):
            loss.backward()  # steps 5 and 3 run inside it, unit by unit
        self.step()
        self.zero_grad()
        return loss.detach()

    # Forward.

    def before_forward(self, unit, module, inputs):
        if in_backward():  # activation checkpointing runs the unit's forward again, inside backward
            return self.before_backward(unit)
        for each in (unit, *unit.following):
            each.start_gather()
        unit.wait()

    def after_forward(self, unit, module, inputs, output):
        if in_backward():
            return  # a recomputed unit stays gathered, because its own backward comes next
        # The last unit is freed as well, although backward soon gathers it again. The reason is that head and loss come
        # in between, and their activations are among the largest.
        unit.free()
        self.watch_output(unit, output)

    # Backward. For an ordinary unit, autograd first calls `on_output`. This makes sure that the unit is gathered, and
    # starts the gather of the unit that ran before it in forward. Then autograd computes, and calls `on_gradient` once
    # for each parameter. After the last parameter, `finish` frees the unit and sends its gradients.
    #
    # A unit must be gathered before backward reads its weights, so the stage has to learn in time which unit backward
    # has reached. There are two events for this:
    #
    #     on_output   a gradient has arrived at an output of the unit
    #     unpack      autograd is about to read a tensor that forward has saved, and this tensor is a weight of the
    #                 unit. (In y = x @ W.T the gradient of x is computed from W, so forward saves W.)
    #
    # Which event comes first depends on the model. `Probe` and `Block` in this table are two modules that follow below:
    #
    #                 an ordinary unit   `Probe`: a loss inside   `Block`: a checkpoint inside   the root
    #     on_output   comes first        comes too late           comes first                    is not watched
    #     unpack      comes second       comes first              never comes                    comes first
    #
    # The event that comes first gathers the unit, or waits for the gather if the unit is prefetched. It also prefetches
    # the unit that ran before this one. The other event has nothing left to do. (The root is gathered already.) Most
    # models would need only `unpack`. Of the two modules that follow, one needs `unpack`, the other `on_output`.
    #
    # `Probe` needs `unpack`. Its output `x` has two uses, the linear layer and the next unit. The hook on `x` runs only
    # when both uses have computed their gradients of `x`. The backward of the linear layer computes one of these
    # gradients, and reads the weight to do so. So `on_output` comes too late:
    #
    #     class Probe(nn.Module):
    #         def forward(self, x):
    #             self.loss = self.linear(x).square().mean()      # the training loop adds it to its loss
    #             return x
    #
    # `Block` needs `on_output`. A checkpoint keeps no activations in forward, and runs its forward again in backward.
    # It installs its own hooks on saved tensors, and torch calls only the innermost hooks. So no weight inside the
    # checkpoint passes through `pack`. When `self.linear` runs again, it reads the weight without an earlier `unpack`:
    #
    #     class Block(nn.Module):
    #         def forward(self, x):
    #             return x + checkpoint(self.linear, x, use_reentrant=False)
    #
    # (If the checkpoint is around a whole unit, this unit's forward runs again in backward, with its hooks. Then
    # `before_forward` gathers it.)

    def watch_output(self, unit, output):
        """In forward: have autograd call `on_output` when it has the gradient of one of the unit's outputs."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(weak_hook(self.on_output, unit))

    @staticmethod  # because torch keeps it with each saved tensor, and a bound method would keep the stage alive
    def pack(tensor):
        """In forward: autograd calls this method to save `tensor`, and keeps the result.

        An operation such as `exp` saves its own output. If this very tensor were kept, the operation's node in the
        graph would refer to the output, and the output would refer to the node (`grad_fn`). Such a cycle is never
        freed, because the node is in C++. `detach` returns a tensor that shares the memory, but has no node.
        """
        return tensor.detach(), tensor._version

    def unpack(self, saved):
        """Autograd calls this in backward, right before it reads a saved tensor."""
        tensor, version = saved
        if tensor._version != version:  # autograd checks this itself, but not for tensors that pass through hooks
            raise RuntimeError(f"a saved tensor of shape {tuple(tensor.shape)} was changed in place before backward")
        unit = self.unit_of_storage.get(storage_of(tensor))  # the unit that owns this memory, or None
        if unit is not None and in_backward():
            self.before_backward(unit)
        elif unit is not None:
            check_allocated(unit)  # something other than backward reads it, for example a debugger
        return tensor

    def on_output(self, unit, gradient):
        """Autograd calls this in backward, when it has the gradient of one of the unit's outputs."""
        self.notice_backward()
        if unit.missing:  # else the unit is done, and this output is one of its inputs, passed on unchanged
            self.before_backward(unit)

    def before_backward(self, unit):
        """Gather `unit`, and start to gather the units that ran before it, which backward needs next.

        The root's head comes first in backward, so the last unit is gathered while the head computes.
        """
        self.notice_backward()
        unit.start_gather()
        for each in unit.preceding:
            # Skip a unit whose backward is over. If autograd reads a weight of the root at the very end (for example
            # the weight of a norm after the embedding), `root.preceding` still lists the last units, which are not
            # needed any more.
            if each.missing:
                each.start_gather()
        unit.wait()

    def notice_backward(self):
        """At the first event of a backward: expect all gradients, and have autograd call `end_backward` at the end.

        Every event and every gradient calls this method, and autograd's number shows whether the backward is a new one.
        This number and `queue_callback` are not public. FSDP2 uses both, because torch has no public way to learn when
        a backward ends. `step()` would be too late for the work of `end_backward`: with several backwards before a
        step, the root's whole gradients, which are sent last, would stay in memory through the next forward.
        """
        number = torch._C._current_graph_task_id()
        if self.backward_id != number:
            self.backward_id = number
            self.expect_gradients()
            Variable._execution_engine.queue_callback(weak_hook(self.end_backward))

    def expect_gradients(self):
        """Mark every gradient as missing."""
        for unit in self.units:
            unit.missing = set(unit.params)

    def on_gradient(self, param):
        """Autograd calls this in backward, when it has finished `param.grad`. After its last gradient a unit is done.

        A complete unit does not wait for its turn, as a bucket of ZeRO-2 does, because all ranks must run the units in
        the same order anyway: each gather meets the other ranks' gathers.
        """
        self.notice_backward()  # adding a bias saves nothing, so its gradient can come before any `unpack`
        unit = self.unit_of_param[param]
        check_gradient(unit, param)
        unit.missing.remove(param)
        if not unit.missing:
            self.finish(unit)

    def finish(self, unit):
        """The unit's backward is over: free its weights, and send its gradients."""
        unit.free()  # first, so that this unit's weights and its reduction's buffer are never alive together
        self.send(unit)

    def send(self, unit):
        """Step 3, first half, as in ZeRO-2: receive the previous unit, then send this one."""
        with record_function("step 3 reduce gradients"):
            self.receive()
            with record_function(f"send {unit.name}"):
                self.in_flight = self.make_reduction(unit)
                self.in_flight.start()

    def receive(self):
        """Step 3, second half: receive the unit in flight, if there is one."""
        if self.in_flight is not None:
            with record_function(f"receive {self.in_flight.bucket.name}"):
                self.in_flight.finish()
                self.in_flight = None

    def end_backward(self):
        """Autograd calls this when backward is over."""
        self.receive()  # the last reduction, usually the root's
        self.free_all()  # units without a gradient, and units that were gathered again after their last gradient

    def free_all(self):
        for unit in self.units:
            unit.free()

    # The end of the step.

    def step(self):
        """The end of step 3, and step 4. Step 5 is not here, because the next forward gathers the units it needs."""
        with record_function("step 3 reduce gradients"):
            self.reduce_gradients()
        # A forward without a backward leaves units gathered, and after step 4 their weights would be stale. `free` also
        # waits for a gather in flight, which still reads the shards that step 4 changes.
        self.free_all()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        for unit in self.units:
            increment_version(unit.params)  # so that a graph built before the step raises an error, as in ZeRO-1
            unit.version = version_of(unit)  # this change is no mistake: see `check_unwritten`

    def reduce_gradients(self):
        """A complete backward leaves nothing to reduce. Raises RuntimeError if gradients are missing or not sent."""
        self.receive()  # what an unfinished backward has left in flight
        check_complete(self.units)

    def zero_grad(self):
        """Clear all gradients, including what an unfinished backward has left. Call it after `step()`."""
        self.receive()  # otherwise the next backward would receive the unit in flight, and add it to the new gradients
        self.expect_gradients()
        for unit in self.units:
            unit.shard.grad = None
            for param in unit.params:
                param.grad = None

    # Step 0. `check`, `broadcast_untrained` and `take_over_optimizer` are the same as in `ZeRO2`.

    def check(self):
        check_model(self.model, self.group)
        check_optimizer(self.model, self.optimizer)

    def partition(self, modules):
        """Step 0: decide which rank owns what. Returns the units in the order of `modules`, with the root last."""
        self.broadcast_untrained()
        names = {module: name for name, module in self.model.named_modules()}
        units = []
        for module, named_params in parameters_by_unit(self.model, modules).items():
            units += self.make_units(names[module] or "root", module, named_params)
        return units

    def broadcast_untrained(self):
        """Step 0: frozen parameters and buffers get rank 0's values and stay whole. No stage changes them later."""
        broadcast_whole(self.model.parameters(), self.group)
        broadcast_whole(self.model.buffers(), self.group)

    def make_units(self, name, module, named_params):
        """One unit for a module's trained parameters, or one per dtype, because a buffer has one dtype."""
        by_dtype = {}
        for param_name, param in named_params:
            if param.requires_grad:
                by_dtype.setdefault(param.dtype, []).append((param_name, param))
        return [Unit(name, module, pairs, self.group) for pairs in by_dtype.values()]

    def plan_prefetch(self, prefetch):
        """Step 0: choose the units to gather together with each unit, in forward and in backward.

        The root is used before the first unit and after the last one, so these two are its neighbours.
        """
        ahead = prefetch if self.world_size > 1 else 0  # a single rank has nothing to wait for, so it saves the memory
        inner = [unit for unit in self.units if unit.module is not self.model]
        for index, unit in enumerate(inner):
            unit.following = inner[index + 1 : index + 1 + ahead]
            unit.preceding = inner[max(0, index - ahead) : index][::-1]
        for root in self.units[len(inner) :]:
            root.following = inner[:ahead]
            root.preceding = inner[::-1][:ahead]

    def take_over_optimizer(self):
        take_over(self.optimizer, self.units)

    def watch_forward(self):
        """Step 0: have torch call `before_forward` and `after_forward` around the forward of each unit."""
        for unit in self.units:
            before = weak_hook(self.before_forward, unit)
            unit.module.register_forward_pre_hook(before, prepend=True)  # runs before hooks of yours that read weights
            if unit.module is not self.model:  # the root is freed later
                unit.module.register_forward_hook(weak_hook(self.after_forward, unit))

    def watch_gradients(self):
        """Step 0: have autograd call `on_gradient(param)` whenever it has finished a `param.grad`."""
        for param in self.unit_of_param:
            param.register_post_accumulate_grad_hook(weak_hook(self.on_gradient))

    def make_reduction(self, unit):
        return Reduction(unit)  # it copies the gradients to its own buffer, so `flat` may be without memory


class Unit(Bucket):
    """A bucket of one module's parameters, which are gathered and freed together. `flat` has no memory in between.

    tensor      shape           memory                                  lives
    flat        (numel,)        its own; every weight is a view of it   always; has memory while the unit is gathered
    shard       (shard_numel,)  its own                                 always
    shard.grad  (shard_numel,)  the reduction's `shard_gradient`        from the unit's reduction to `zero_grad()`

    Why freeing means resizing the storage: the obvious way to free a weight is `param.data = shard`. That does not free
    the memory, because `F.linear` has saved `weight.t()` for its backward, and a view keeps the whole storage alive.
    Backward multiplies by these views. So the views stay, and only their memory is freed: `storage.resize_(0)` gives
    the memory back, and every tensor on this storage keeps its shape. After `resize_` to the old size, the next gather
    fills the weights and all their views. FSDP2 does the same. (Whole gradients need no `resize_`. Autograd does not
    save them, so they are freed when the last reference is dropped.)
    """

    def __init__(self, name, module, named_params, group):
        super().__init__(name, named_params, group)
        self.module = module
        self.following = []  # units to gather with it in forward, because they run next
        self.preceding = []  # units to gather with it in backward
        self.work = None  # this unit's all-gather, while it is in flight
        self.allocated = True  # whether `flat` has memory; `work` may still have to fill it
        self.version = version_of(self)
        self.free()

    def make_shard(self):
        """Step 0: a copy of this rank's part of `flat`, which stays when `flat` is freed."""
        return self.flat[self.own].clone()

    def start_gather(self):
        """Step 5, first half. A gather is started before the computation that hides it, and waited for after."""
        if not self.allocated:
            with record_function("step 5 gather parameters"), record_function(f"gather {self.name}"):
                self.flat.untyped_storage().resize_(self.flat.nbytes)
                self.work = self.gather()
            self.allocated = True

    def wait(self):
        """Step 5, second half: from here on the unit may compute."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def free(self):
        """Give back the memory of the gathered parameters. This rank's shard stays.

        On a GPU, Python gets here while operations that read the weights are still queued. That is safe, because
        the allocator gives the memory only to operations that are queued later on the same stream (a GPU's queue). A
        collective runs on its own stream, but first waits for everything that was queued on this stream.
        """
        if self.allocated:
            self.wait()  # never free a buffer that a collective still writes to
            with record_function(f"free {self.name}"):
                self.flat.untyped_storage().resize_(0)
            self.allocated = False
            check_unwritten(self)


def default_units(module):
    """The modules that become units: the entries of every outermost ModuleList or Sequential.

    An entry without its own forward only holds other modules. It is never called, so its children are searched.
    """
    found = []
    for child in module.children():
        is_entry = isinstance(module, (nn.ModuleList, nn.Sequential))
        has_forward = type(child).forward is not nn.Module.forward
        if is_entry and has_forward:
            found.append(child)
        else:
            found += default_units(child)
    return list(dict.fromkeys(found))  # each once


def parameters_by_unit(model, modules):
    """A dict: for each module that becomes a unit, and last for the model as the root, its list of (name, parameter).

    Every parameter is in exactly one list. The root's list contains the parameters that are in no unit, and the
    parameters that modules of different units share (tied weights).
    """
    home_of_module = {}  # module -> the one of `modules` that contains it; the model if several do
    for top in modules:
        for module in top.modules():
            home_of_module[module] = model if module in home_of_module else top
    home_of_param = {}  # the same for parameters
    for module in model.modules():
        home = home_of_module.get(module, model)
        for param in module.parameters(recurse=False):
            home_of_param[param] = home if home_of_param.get(param, home) is home else model
    params_of = {home: [] for home in (*modules, model)}
    for name, param in model.named_parameters():
        params_of[home_of_param[param]].append((name, param))
    return params_of


def storage_of(tensor):
    """An identifier that all views of one storage share. None for a sparse tensor, which has several storages."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return None


def in_backward():
    return torch._C._current_graph_task_id() != -1


# For reference: what ZeRO-3 refuses, in addition to what ZeRO-1 and ZeRO-2 refuse.


def version_of(unit):
    """A number that changes when somebody writes to a weight in place.

    A gather writes to `flat`. This does not change the number, because a parameter that was moved to `flat` with
    `param.data = ...` shares its memory, but not its version.
    """
    return sum([param._version for param in unit.params])


def check_unwritten(unit):
    """Raise RuntimeError if a gathered weight was written to, because the change is lost when the unit is freed."""
    before, unit.version = unit.version, version_of(unit)
    if unit.version != before:
        raise RuntimeError(
            f"a weight of {unit.name!r} was changed in place while it was gathered, for example by the forward itself. "
            "The change would be lost, because only the shards are kept: change it in the optimizer's shards, or use "
            "ZeRO-1 or ZeRO-2"
        )


def check_allocated(unit):
    """Raise RuntimeError if a freed weight is read outside of backward, as tools that draw the graph do."""
    if not unit.allocated:
        raise RuntimeError(
            f"a weight of {unit.name!r} that forward saved was read outside of backward, and it is freed"
        )


# To save, each rank saves `[unit.shard for unit in engine.units]` and its `optimizer.state_dict()`. To load, build the
# stage with the same number of ranks and the same units, and copy the shards back: `unit.shard.copy_(saved)`.
# (zerolab/engine/state_dict.py gathers the whole model.)
#
# What ZeRO-3 trains
#
# - What ZeRO-2 trains, and activation checkpointing (`use_reentrant=False`) of whole units or inside units.
# - Units that run more than once. They stay gathered between their backwards.
#
# What it raises
#
# - What ZeRO-2 raises.
# - After forward, or at the end of backward: a gathered weight that was changed in place (`weight.clamp_()`).
# - Outside of backward: a tool that reads freed weights from the graph.
#
# What it does not detect, besides what ZeRO-2 does not detect
#
# - Code that reads a freed weight. Depending on the operation, it gets an error from torch, it crashes the process
#   (SIGSEGV), or it gets a wrong value if the unit's gather has been started but not waited for. This happens with
#   - `model.state_dict()`, `copy.deepcopy(model)`, `torch.save(model)`, printing, changing or loading
#     (`load_state_dict`) a weight;
#   - a module of the model that is called by itself, or weights that are used outside the forward of their unit, for
#     example in the loss, in another module, in a forward hook that you register after the build, or after the unit has
#     returned or stored them;
#   - a unit that calls itself, because the inner call frees it;
#   - a reentrant checkpoint;
#   - a checkpoint around a part of the root (such as the head), if an evaluation, a step, or the backward of another
#     forward comes between its forward and its backward, because each of these frees the root;
#   - a checkpoint inside a unit, if the unit computes an additional loss in it after its output, because backward then
#     recomputes this loss before a gradient arrives at the output, or if the output is a dataclass, in which
#     `watch_output` finds no tensors;
#   - gradients of gradients, as for a gradient penalty (`torch.autograd.grad(..., create_graph=True)`).
# - A forward that writes to `weight.data`: the change is lost when the unit is freed.
# - A rank that runs units in a different order, or without the others (`if rank == 0: evaluate()`): ranks wait for each
#   other, or one rank's unit receives shards of a different unit.
# - `torch.autograd.grad` between backward and `step()`: it counts as a backward that produced no gradients, so `step()`
#   raises an error although no gradient is missing.
#
# What goes wrong if you delete a line. A test deletes each of these lines, and checks what is said here.
#
# - `each.start_gather()` in `ZeRO3.before_forward`: a crash, an error or garbage. The unit computes without memory.
# - `unit.wait()` in `ZeRO3.before_forward`: silently wrong. The unit computes with memory that the gather has not
#   filled yet.
# - `unit.free()` in `ZeRO3.after_forward`: more memory. All units are gathered at the end of forward.
# - `self.watch_output(unit, output)` in `ZeRO3.after_forward`: the class `Block` above reads a freed weight in
#   backward, or with prefetch a weight whose gather is not waited for: an error, or silently wrong.
# - `self.before_backward(unit)` in `ZeRO3.unpack`: the same for the class `Probe` above.
# - `if each.missing:` in `ZeRO3.before_backward`, as `if True:`: with a norm after the embedding, one more gather in
#   each step. The last unit is gathered again, and stays so until the end of backward.
# - `self.expect_gradients()` in `ZeRO3.notice_backward`: an error in the second backward before a step, "a second
#   gradient of ... came before its bucket was complete".
# - `Variable._execution_engine.queue_callback(weak_hook(self.end_backward))` in `ZeRO3.notice_backward`: more memory.
#   The last reduction, with its whole gradients, stays until `step()`.
# - `unit.free()` in `ZeRO3.finish`: more memory. All units are gathered at the end of backward.
# - `self.receive()` in `ZeRO3.send`: an error in `step()`, "optimizer.step() was called before the gradients were
#   reduced". Only the last unit is received.
# - `self.free_all()` in `ZeRO3.__call__`: more memory. The root stays gathered after an evaluation.
# - `self.free_all()` in `ZeRO3.step`: silently wrong after a forward without a backward, which leaves the root
#   gathered. The next forward uses the root's stale weights.
# - `increment_version(unit.params)` in `ZeRO3.step`: silently wrong, if a backward uses a graph built before the step.
# - `self.flat.untyped_storage().resize_(0)` in `Unit.free`: more memory. Nothing is ever freed.
#
# Two changes that look harmless. The new line is the one after *as*:
#
# - `return self.flat[self.own].clone()` in `Unit.make_shard`, as `return self.flat[self.own]`: a crash or garbage. The
#   shard would be in the memory that is freed.
# - `return tensor.detach(), tensor._version` in `ZeRO3.pack`, as `return tensor, tensor._version`: more memory. The
#   result that `exp` has saved is never freed, if its backward does not run.
#
# The cost. Ψ is the number of parameters; memory is in bytes (float32 and AdamW), traffic in elements.
#
#     held   4Ψ/N parameters + 4Ψ/N gradients + 8Ψ/N optimizer state      7e9 parameters, N = 8: 14 GB
#     peak   16Ψ/N + 4(R + 2U) + 4(H + 2U) - 4(R + 2U)/N, with prefetch 1 and without activations
#     sent   Ψ all-gather in forward + Ψ all-gather in backward + Ψ reduce-scatter = 3Ψ per rank and step (DDP: 2Ψ)
#
# R, U and H are numbers of elements: R of the root, U of a unit, and H of the root's parameters that are used after the
# units (the last norm and the head). The peak comes late in backward. Then these are in memory:
#
#     16Ψ/N           the shards of weights, gradients and optimizer state
#     4(R + 2U)       whole weights: the root, the unit that computes, and the prefetched unit
#     4(H + 2U)       whole gradients of the unit that computes, of the unit in flight, and of the head. The root is
#                     reduced when it has all its gradients, so the head's gradients wait for the embedding's gradients
#     -4(R + 2U)/N    the root, the unit that computes and the prefetched unit have no gradient shard yet
#
# So more gradients are whole than in ZeRO-2, where the head has its own buckets. With a large root, the peak comes at
# the end of backward instead, and is 16Ψ/N + 8R + 4U - 4R/N: the root has whole weights and gradients (8R) and no
# gradient shard yet (-4R/N), and one unit is in flight (4U). This peak is the larger of the two if R - H > 3U - 2U/N.
# For the demo the formula is exact to 1% on 2, 4 and 8 ranks. On CPUs, gloo also copies what it gathers and reduces.
# These copies are as large as two to three units, and the demo does not count them.
#
# The root is gathered once per step, so a little less than 3Ψ is sent. With k backwards before a step, k times as much
# is sent. (Paper, sections 5.3 for memory and 7 for traffic.)


if __name__ == "__main__":
    main(ZeRO3, prefetch=1)
