"""bytes alive at the worst moment in a step"""

from zero2 import ZeRO2


class Engine(ZeRO2):
    def accumulate(self, batches, loss_fn):
        losses = [loss_fn(self(inputs), targets) for inputs, targets in batches]
        (sum(losses) / len(losses)).backward()
        self.step()
        self.zero_grad()
