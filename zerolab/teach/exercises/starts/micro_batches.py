"""ZeRO-2 on four micro-batches per step that sends 2Ψ: one reduction per step, and not one per backward.

The chapter reduces in every backward: 4Ψ, and Ψ for the weights. The gradients of a step can be added up before they
are sent. What does that cost in bytes held? Each micro-batch has its own forward and backward: micro-batches exist
because the activations of all of them together do not fit. Check it: ./launch.sh check micro_batches
"""

from zero2 import ZeRO2


class Engine(ZeRO2):
    def accumulate(self, batches, loss_fn):
        """One whole step: a backward for each (inputs, targets) of `batches`, by their mean loss; then the update."""
        raise NotImplementedError("Step 3: one reduction for all micro-batches")
