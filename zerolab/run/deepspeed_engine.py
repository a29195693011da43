"""DeepSpeed's ZeRO 1, 2 and 3, used as its users use them, if DeepSpeed is installed (`pip install .[peers]`).

Its step is torch's loop: `loss.backward()` and `engine.step()`, of which the latter is also the end of gradient
accumulation (`managed_gradient_accumulation: false`). `held_tensors` finds what it keeps.
"""

import contextlib
import io
import logging
import os
import warnings

import torch
from torch import nn
from torch.profiler import record_function

from zerolab.run.micro_batches import Looped


def default_bucket_mb(params) -> float:
    """The size of our buckets: at most 25 MiB, and at most a sixth of the parameters, but not less than 1 MiB."""
    return min(25, max(1, sum(param.nbytes for param in params) / 6 / 2**20))


def config(stage: int, model: nn.Module, dtype: torch.dtype | None) -> dict:
    """DeepSpeed's configuration. What is not here has its default.

    Some defaults are for models of billions of parameters, and would make its stages 2 and 3 keep a small model whole:
    a bucket has 5e8 elements (2 GB), and stage 3 always keeps parameters of up to 1e5 elements whole, and up to 1e9
    elements after their use. So buckets get the size of our buckets, and stage 3 keeps nothing.
    """
    mib = int(default_bucket_mb(model.parameters()))  # whole ones: it wants an even number of elements
    bucket = mib * 2**18  # elements of 4 bytes
    return {
        "train_micro_batch_size_per_gpu": 1,  # only for its own reports: batches of any size can be passed in
        "gradient_clipping": 0.0,  # the default is 1.0 and would change the losses
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,  # torch's AdamW, as in all other engines
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "bf16": {"enabled": dtype is torch.bfloat16},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }


def build(model: nn.Module, optimizer, device: torch.device, stage: int, dtype=None) -> "DeepSpeedStep":
    """DeepSpeed's engine of that stage around `model`."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # It calls torch's collectives by the names that they had before torch 2.13, in every step.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    for group in optimizer.param_groups:  # DeepSpeed does not support frozen ones there
        group["params"][:] = [param for param in group["params"] if param.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its accelerator
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config(stage, model, dtype), dist_init_required=False
        )
    return DeepSpeedStep(engine)


class DeepSpeedStep(Looped):
    """DeepSpeed's engine with the names that a referee calls. `optimizer` is torch's, over DeepSpeed's partitions."""

    def __init__(self, engine):
        self.engine, self.model, self.optimizer = engine, engine.module, engine.optimizer.optimizer

    def __call__(self, *inputs, **named):
        return self.engine(*inputs, **named)

    def step(self) -> None:
        with record_function("step 4 update the shard"):
            self.engine.step()

    def zero_grad(self) -> None:
        """DeepSpeed's `step` drops the gradients itself."""

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """{name: whole tensor on the CPU}: of stage 3 the parameters are gathered for it. A collective."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def held_tensors(self) -> dict[str, list]:
        """{"parameters", "gradients", "optimizer"}: nested lists of tensors, by the names of DeepSpeed 0.19.

        The partition that the optimizer updates is a copy of the model's weights, also in float32.
        """
        zero, params = self.engine.optimizer, list(self.model.parameters())
        partitions = [p for group in self.optimizer.param_groups for p in group["params"]]
        whole = ("bit16_groups_flat", "single_partition_of_fp32_groups")
        shards = ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat")
        sums = ("averaged_gradients", "grad_partitions_flat_buffer")
        kept = [getattr(zero, name, None) for name in (*whole, *shards)]
        gradients = [param.grad for param in (*params, *partitions)]
        gradients += [getattr(zero, name, None) for name in sums]
        gradients += [vars(bucket).get("buffer") for bucket in zero.ipg_buckets.values()]
        return {
            "parameters": [params, partitions, kept, [getattr(param, "ds_tensor", None) for param in params]],
            "gradients": gradients,
            "optimizer": [*self.optimizer.state.values()],
        }
