"""The engine, not the units, keeps the second shards, from a forward to the end of the next backward."""

from functools import partial

import torch
import torch.distributed as dist

from zero3 import ZeRO3, in_backward


class Engine(ZeRO3):
    def __init__(self, model, optimizer, *, units=None, prefetch=1, group=None):
        super().__init__(model, optimizer, units=units, prefetch=prefetch, group=group)
        self.second = {}
        self.place = dist.get_rank() % 2
        for first in (0, 2):
            machine = dist.new_group([first, first + 1])
            if dist.get_rank() in (first, first + 1):
                self.machine = machine
        for unit in self.units:
            unit.gather = partial(self.gather, unit, unit.gather)

    def gather(self, unit, across_machines):
        if in_backward() and unit in self.second:
            halves = list(unit.flat.chunk(2))
            return dist.all_gather(halves, self.second[unit], group=self.machine, async_op=True)
        return across_machines()

    def after_forward(self, unit, module, inputs, output):
        if torch.is_grad_enabled() and not in_backward():
            half = unit.numel // 2
            self.second[unit] = unit.flat[self.place * half :][:half].clone()
        super().after_forward(unit, module, inputs, output)

    def end_backward(self):
        super().end_backward()
        self.second.clear()
