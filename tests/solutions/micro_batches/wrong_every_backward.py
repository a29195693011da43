"""bytes sent in a step"""

from zero2 import ZeRO2


class Engine(ZeRO2):
    def accumulate(self, batches, loss_fn):
        for inputs, targets in batches:
            (loss_fn(self(inputs), targets) / len(batches)).backward()
        self.step()
        self.zero_grad()
