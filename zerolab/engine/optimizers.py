"""Several optimizers: `ZeRO2Engine(model, [muon, adamw])`, for example Muon for the matrices and AdamW for the rest.

Every trained parameter is in exactly one of them. Schedulers and your loop use each optimizer as before, and
`engine.step()` calls `step()` of all of them. `engine.optimizers` is always a list.
"""


class Optimizers:
    """Several optimizers as one, `engine.optimizer`: it has the attributes that the chapters and the tools use."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        """The groups of all optimizers, in order. They are the optimizers' own dictionaries, so you may change them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        """{parameter: its state} of all optimizers. Write to the state of an optimizer itself, not to this copy."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def register_step_pre_hook(self, hook):
        """`hook` runs once per step, before the first optimizer."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def as_list(optimizer):
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def as_one(optimizers):
    return optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers)
