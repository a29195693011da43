"""ZeRO-3 in models that are unusual: unused parameters, graphs of backward, weights used outside of their unit."""

import warnings

import torch

from harness.engine.hooks import WeakHook, backward_now, not_compiled
from harness.engine.safety import guard
from harness.engine.unit_life import UnitLife, Visit


class ZeRO3Engine(UnitLife):
    """ZeRO-3 for real training. Options beside the chapter's: `Engine.prepare`.

    With `reshard_after_forward=False` a unit stays gathered from forward to backward: 2Ψ are sent and not 3Ψ, and all
    parameters are gathered in between. A model on torch's device `meta` has shapes and no memory. It gets its memory
    unit by unit, and its values by `init_fn(name, tensor)`, which fills a tensor in place, or from `state_dict`.
    """

    def __init__(self, *args, **options):
        self.kept = set()  # units that a backward with a graph of its own has read: gathered until `step()`
        self.lent = set()  # units whose weights this forward has used outside of their own forward
        self.warned = set()  # names of those that a warning was given for
        super().__init__(*args, **options)
        for unit in self.all_units:
            guard.watch(unit.params, WeakHook(self.touched, unit))
        self.warn_of_a_large_root()

    def warn_of_a_large_root(self) -> None:
        total, root = (sum(b.numel for b in buckets) for buckets in (self.all_buckets, self.root.buckets))
        if 2 * root > total and self.placement.rank == 0:
            warnings.warn(
                f"no unit holds {root / total:.0%} of the model ({len(self.units)} units in all). That part stays "
                "gathered from the start of forward to the end of backward, and saves little. Pass units=[...], "
                "the modules to gather and free one after the other, such as the model's layers",
                stacklevel=3,
            )

    # Weights that are used outside of the forward of their unit.

    def touched(self, unit, param) -> bool:
        """A weight is used while its unit is freed. True if the model does it: then the unit is gathered now."""
        if backward_now() is not None and self.backward_number is not None:  # a part of a unit runs again
            self.notice_backward()
            self.gather(unit)
            return True
        if not self.in_forward:
            return False
        # A part of the model uses the weight without calling the unit, so nothing tells when it is done.
        if unit.name not in self.warned and self.placement.rank == 0:
            self.warned.add(unit.name)
            warnings.warn(
                f"the model uses {param.zero_name!r} outside of the forward of its unit {unit.name!r}. The unit is "
                "gathered for it, and stays so until the model's forward ends, in every step. For less memory pass "
                "units= that hold whole modules whose weights only their own forward uses",
                stacklevel=8,  # past `not_compiled`, which is on the way twice
            )
        self.lent.add(unit)
        self.gather(unit)
        return True

    def free_after_forward(self, unit) -> None:
        if unit not in self.lent:
            unit.free()

    def before_model(self, module, args, kwargs) -> None:
        if backward_now() is None:
            self.lent = set()
        super().before_model(module, args, kwargs)

    def after_model(self, module, args, output):
        output = super().after_model(module, args, output)
        if backward_now() is None and self.reshard_after_forward:
            for unit in self.lent:
                unit.free()
        return output

    # Graphs of backward, which may be gone through later, and read the weights.

    def weight_is_wanted(self, visit: Visit) -> None:
        if self.find_unused:
            self.come(visit)
        super().weight_is_wanted(visit)
        if torch.is_grad_enabled():
            self.kept.add(visit.unit)

    def free_after_backward(self, unit) -> None:
        if unit not in self.kept:
            unit.free()

    @not_compiled
    def zero_grad(self) -> None:
        if self.kept:
            self.free_all()
        self.kept = set()
        super().zero_grad()

    def stepped(self) -> None:
        self.kept = set()  # `step()` frees them
        super().stepped()

    # Parameters without a gradient (`find_unused`). It may never come on another rank, and collectives match by their
    # turn alone: no rank may send a unit earlier than another. So what tells is that backward comes to the next unit.

    def finish_work(self, following) -> None:
        if not self.find_unused:
            return super().finish_work(following)
        unit = self.at_work
        if unit is None or unit is following:
            return
        for bucket in unit.trained_buckets:
            bucket.missing = set()
        self.over(unit)
        for bucket in unit.trained_buckets:  # a unit that has run twice brings gradients when backward is back
            bucket.missing = set(range(len(bucket.params)))

    def come(self, visit: Visit) -> None:
        if self.find_unused and backward_now() is not None and visit in self.asked and visit.unit is not self.root:
            self.finish_work(visit.unit)
            self.at_work = visit.unit
            if visit.unit not in self.waiting:  # sent already, and backward comes to it once more
                self.waiting.append(visit.unit)
        super().come(visit)
        if self.find_unused and visit.unit not in self.waiting:
            self.waiting.append(visit.unit)

    def may_be_over(self, unit) -> None:
        if not self.find_unused:
            super().may_be_over(unit)

    def left_at_the_end(self) -> list:
        if not self.find_unused:
            return super().left_at_the_end()
        return list(dict.fromkeys(filter(None, (self.at_work, *self.waiting))))
