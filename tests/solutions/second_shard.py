import torch.distributed as dist

from zero1 import all_gather
from zero3 import Unit, ZeRO3


class TwoShards(Unit):
    inside = second = None

    def gather(self):
        if self.second is None:
            return super().gather()
        return all_gather(self.flat, self.second, group=self.inside, async_op=True)

    def free(self):
        if self.allocated and self.inside is not None and self.second is None:
            self.wait()
            self.second = self.flat.chunk(2)[dist.get_rank(self.inside)].clone()
        super().free()


class Engine(ZeRO3):
    def __init__(self, model, optimizer, *, units=None, prefetch=1, group=None):
        super().__init__(model, optimizer, units=units, prefetch=prefetch, group=group)
        machines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for unit in self.units:
            unit.inside = machines[dist.get_rank() // 2]

    def make_units(self, name, module, named_params):
        trained = [pair for pair in named_params if pair[1].requires_grad]
        return [TwoShards(name, module, trained, self.group)] if trained else []

    def step(self):
        super().step()
        for unit in self.units:
            unit.second = None
