"""Inside torch's pipelines: the gradients that an engine has are divided, too.

A schedule of `torch.distributed.pipelining` sends k micro-batches through the parts of a model. By default
(`scale_grads=True`) it then calls `scale_grads(k)` of its stage, which divides every `param.grad` by k. An engine's
gradients have left `param.grad` by then: they would stay k times too large, and no error would say so. torch knows
FSDP2's modules there and asks nobody else, so we put ourselves in front of that one method.
"""

import functools
import sys


def heed() -> None:
    """Called at every forward of an engine's model, once that module was imported: a pipeline may be its caller."""
    module = sys.modules["torch.distributed.pipelining.stage"]
    if hasattr(module._PipelineStageBase, "zero_heeds"):
        return
    of_torch = module._PipelineStageBase.scale_grads

    @functools.wraps(of_torch)
    def scale_grads(stage, grad_scale_factor: int) -> None:
        of_torch(stage, grad_scale_factor)
        for engine in {p.zero_engine() for p in stage.submod.parameters() if hasattr(p, "zero_engine")}:
            # Divided at the end of step 3, when the pipeline is empty: an error in here would let other parts wait.
            engine.divisor, engine.gradients_are_reduced = grad_scale_factor, False

    module._PipelineStageBase.scale_grads, module._PipelineStageBase.zero_heeds = scale_grads, True
