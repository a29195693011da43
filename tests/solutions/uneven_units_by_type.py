from torch import nn

from zero3 import ZeRO3


class Engine(ZeRO3):
    def __init__(self, model, optimizer, *, group=None):
        units = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                units.append(module)
        super().__init__(model, optimizer, units=units, prefetch=1, group=group)
