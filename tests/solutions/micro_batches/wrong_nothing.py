"""the weights after two steps"""

from zero2 import ZeRO2


class Engine(ZeRO2):
    def accumulate(self, batches, loss_fn):
        return
