"""What every stage offers beside its steps. None of it is the lesson, and no step is hidden here."""

from harness.engine import gradients, state


class Interface:
    """A stage is called like its model, clips, adds up several backwards, and gives and takes whole weights."""

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def no_sync(self):
        """`with engine.no_sync():` around all but the last of several backwards before a step.

        Gradients then add up on this rank, whole, and nothing is sent.
        """
        return self.moments.no_sync()

    clip_grad_norm_ = gradients.clip_grad_norm_
    full_state_dict = state.full_state_dict
    load_full_state_dict = state.load_full_state_dict
