from zero3 import ZeRO3


class Engine(ZeRO3):
    def __init__(self, model, optimizer, *, group=None):
        layers = [layer for block in model for layer in block]
        super().__init__(model, optimizer, units=layers, group=group)
