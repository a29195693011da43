"""bytes gathered at once in a step"""

from zero3 import ZeRO3


class Engine(ZeRO3):
    def __init__(self, model, optimizer, *, group=None):
        super().__init__(model, optimizer, units=None, group=group)
