"""ZeRO-3 with options.

A module has one unit for each kind of parameter: for each dtype, trained or frozen, cut or whole. Frozen parameters are
sharded too. A unit without a last gradient is done when backward moves on, which backward_order.py finds out.
"""

import warnings
from functools import partial

import torch
from torch.autograd.graph import increment_version

from zero2 import weak_hook
from zero3 import ZeRO3, in_backward, storage_of, version_of
from zerolab.engine import accumulation, checks, meta, parameters
from zerolab.engine.backward_order import BackwardOrder
from zerolab.engine.bucket import EngineReduction, EngineUnit
from zerolab.engine.common import Engine
from zerolab.engine.life import Gradients
from zerolab.engine.precision import tensors_in


class ZeRO3Engine(Engine, ZeRO3):
    """ZeRO-3 with the options of `Engine`, the chapter's `units` and `prefetch`, and

    reshard_after_forward    False: units stay gathered from forward to backward. Sends 2Ψ per step instead of 3Ψ
    reshard_after_backward   False: units stay gathered until `step()`, through all micro-batches
    init_fn, state_dict      where a model on the `meta` device gets its values from (meta.py)
    """

    def __init__(
        self,
        model,
        optimizer,
        *,
        units=None,
        prefetch=1,
        reshard_after_forward=True,
        reshard_after_backward=True,
        init_fn=None,
        state_dict=None,
        **options,
    ):
        self.reshard_after_forward = reshard_after_forward and reshard_after_backward
        self.reshard_after_backward = reshard_after_backward
        self.source = meta.Source(init_fn, state_dict)
        super().__init__(model, optimizer, units=units, prefetch=prefetch, **options)
        parameters.adopt(self.units)  # the frozen ones too
        for unit in self.units:
            parameters.mark_freed(unit.params)
            unit.on_recomputation = weak_hook(self.before_backward, unit)

    @property
    def buckets(self):
        """The units that are trained, under the name that the options use."""
        return self.trained_units

    @property
    def all_buckets(self):
        return self.units

    # Step 0.

    def check(self):
        super().check()
        units = self.chapter_options["units"]
        if units is not None:
            self.chapter_options["units"] = units = list(units)
            checks.check_units(self.model, units)
        prefetch = self.chapter_options["prefetch"]
        if prefetch < 0:
            raise ValueError(f"prefetch must be a number of units, 0 or more, got {prefetch!r}")
        self.source.check(self.model, self.options)

    def partition(self, modules):
        self.source.open(self.model, self.options)
        units = super().partition(self.chapter_options["units"] or modules)
        self.source.finish()
        self.trained_units = [unit for unit in units if unit.trained]
        self.order = BackwardOrder([unit for unit in units if unit.open_ended], root=self.model)
        self.warn_of_large_root(units)
        return units

    def make_units(self, name, module, named_params):
        by_kind = {}
        for param_name, param in named_params:
            kind = param.dtype, param.requires_grad, param in self.options.whole.params
            by_kind.setdefault(kind, []).append((param_name, param))
        units = []
        for pairs in by_kind.values():
            self.source.fill_parameters(pairs)
            unit = EngineUnit(name=name, module=module, named_params=pairs, group=self.group, options=self.options)
            units.append(unit)
        return units

    def watch_gradients(self):
        for unit in self.trained_units:
            for param in unit.params:
                param.register_post_accumulate_grad_hook(weak_hook(self.on_gradient))

    def modules_that_cast(self):
        return dict.fromkeys([self.model, *(unit.module for unit in self.units)])

    def make_reduction(self, unit):
        return EngineReduction(unit)

    def plan_prefetch(self, prefetch):
        """Like the chapter's, but `prefetch` counts modules: a module may have several units, gathered together."""
        ahead = prefetch if self.world_size > 1 else 0
        units_of = {}
        for unit in self.units:
            units_of.setdefault(unit.module, []).append(unit)
        root = units_of.pop(self.model, [])
        inner = list(units_of.values())
        for index, units in enumerate(inner):
            after = inner[index + 1 : index + 1 + ahead]
            before = inner[max(0, index - ahead) : index][::-1]
            plan_module(units, after, before)
        plan_module(root, inner[:ahead], inner[::-1][:ahead])

    def warn_of_large_root(self, units):
        total = sum(unit.numel for unit in units)
        root = sum(unit.numel for unit in units if unit.module is self.model)
        if 2 * root > total and torch.distributed.get_rank(self.options.all_ranks) == 0:
            warnings.warn(
                f"{root / total:.0%} of the model is in no unit, so it stays gathered from the start of forward to the "
                "end of backward. Pass units=[...], the modules to gather and free one by one, such as the layers",
                stacklevel=6,
            )

    # Forward. In a compiled unit the hooks run between two graphs.

    @torch.compiler.disable
    def before_forward(self, unit, module, inputs):
        if in_backward():
            # A checkpoint recomputes several units in a row. Backward has not reached them yet, so it does not leave
            # the one that it is at.
            super().before_backward(unit)
        else:
            super().before_forward(unit, module, inputs)

    @torch.compiler.disable
    def after_forward(self, unit, module, inputs, output):
        if self.reshard_after_forward or in_backward() or not torch.is_grad_enabled():
            super().after_forward(unit, module, inputs, output)
        else:
            self.watch_output(unit, output)

    def watch_output(self, unit, output):
        """Like the chapter's, but also in dataclasses, and with this forward's run (backward_order.py)."""
        run = object()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(weak_hook(self.on_output, unit), run))

    # Backward.

    def unpack(self, saved):
        tensor, _ = saved
        if self.backward_id is None and not in_backward():  # a tool that draws the graph, or a debugger
            unit = self.unit_of_storage.get(storage_of(tensor))
            if unit is None or unit.allocated:
                return tensor
        return super().unpack(saved)

    def on_output(self, unit, run, gradient):
        checks.check_first_order()
        if self.backward_id is None:
            is_done = False  # this is the first event of a backward
        elif unit.open_ended:
            is_done = self.order.is_over(run)
        else:
            is_done = not unit.missing
        if not is_done:
            self.before_backward(unit, run)

    def before_backward(self, unit, run=None):
        done, again = self.order.reach(unit.module, run)
        for each in done:
            self.finish_open_ended(each)
        for each in again:
            each.missing = set(each.params)
        super().before_backward(unit)

    def notice_backward(self):
        if self.backward_id != torch._C._current_graph_task_id():
            checks.check_one_backward(self)
            self.backward_began()
            super().notice_backward()

    def on_gradient(self, param):
        unit = self.unit_of_param[param]
        unit.used.add(param)
        if unit.open_ended:
            self.notice_backward()
            if param not in unit.missing:
                # Backward has reached the unit again, and no other event has shown this. The cause is a checkpoint
                # inside a unit that is still gathered.
                for each in self.order.reopen(unit.module):
                    each.missing = set(each.params)
        super().on_gradient(param)
        if not self.sync and parameters.get_grad(param) is not None:
            accumulation.keep(unit, param)

    def finish(self, unit):
        """The unit has all its gradients. With `find_unused` other ranks may still wait for theirs."""
        if not unit.open_ended:
            self.finish_unit(unit)

    def finish_open_ended(self, unit):
        """Finish a unit without a last gradient, because backward has moved on, or is over."""
        unit.missing.clear()
        self.finish_unit(unit)

    def finish_unit(self, unit):
        if self.reshard_after_backward:
            unit.free()  # first, as in the chapter
        if unit.trained and self.sync:
            self.send(unit)

    def flush(self):
        """The end of backward: finish the units that are not done, in the same order on all ranks."""
        for unit in self.order.end():
            self.finish_open_ended(unit)

    def end_backward(self):
        self.flush()
        for unit in self.units:
            if len(unit.missing) == len(unit.params):
                unit.missing.clear()  # this backward never reached it, for example a gradient of the inputs only
        self.backward_id = None
        self.receive()
        if self.reshard_after_backward:
            self.free_all()

    # The end of the step.

    def finish_reduction(self):
        if self.options.find_unused and self.gradients is Gradients.CLEARED:
            self.flush()  # on this rank, backward has reached no unit
        self.receive()

    def zero_grad(self):
        super().zero_grad()
        self.order.begin()
        self.backward_id = None  # also after a backward that raised an error

    def shards_changed(self):
        """Called after something other than the optimizer has written to the shards."""
        self.free_all()  # gathered weights have the old values
        for unit in self.units:
            increment_version(unit.params)  # a backward through an older graph raises an error, as in plain torch
            unit.version = version_of(unit)


def plan_module(units, after, before):
    """Choose what is gathered with each of a module's units: the module's other units, then the neighbours' units."""
    for unit in units:
        others = [each for each in units if each is not unit]
        unit.following = others + [each for neighbour in after for each in neighbour]
        unit.preceding = others + [each for neighbour in before for each in neighbour]
