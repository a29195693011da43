"""the weights after two steps"""

from zero2 import ZeRO2


class Engine(ZeRO2):
    def accumulate(self, batches, loss_fn):
        for inputs, targets in batches:
            self.last = inputs is batches[-1][0]
            loss_fn(self(inputs), targets).backward()
        self.step()
        self.zero_grad()

    def on_gradient(self, param):
        if self.last:
            super().on_gradient(param)
