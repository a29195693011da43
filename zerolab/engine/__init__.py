"""The second half of the lesson: what real training adds to a chapter, one idea per file.

`ZeRO1Engine`, `ZeRO2Engine` and `ZeRO3Engine` are the chapters plus options. Without options an engine does what its
chapter does, to the bit and in the same collectives. It holds the same bytes, except for the optimizer's step counters,
of which it has one per piece of a parameter (groups.py).

| file | the idea | where the engines use it |
|---|---|---|
| `common.py` | what the three engines have in common | |
| `zero1.py`, `zero2.py`, `zero3.py` | one engine in each file: the moments of its chapter that options change | |
| `life.py` | where the gradients are: one value for all of them | `backward_began`, `reduce_gradients`, `step` |
| `backward_order.py` | the units that backward has finished, module by module | `ZeRO3Engine.before_backward` |
| `options.py` | `engine.options`, from which the other files read the options | |
| `bucket.py` | the changes that options make to a bucket, a unit and a reduction | `make_bucket`, `make_units` |
| `groups.py` | parameter groups: the optimizer gets one piece of the shard per parameter | `take_over_optimizer` |
| `optimizers.py` | several optimizers, such as Muon for the matrices and AdamW for the rest | `Engine.__init__` |
| `whole.py` | parameters that are never cut, for optimizers that look at whole matrices | `EngineBucket` |
| `precision.py` | compute in bfloat16, reduce in another dtype, keep shards in float32 | `EngineBucket` |
| `loss_scaler.py` | float16: if one rank has an infinite gradient, all ranks skip the step | your loop |
| `accumulation.py` | `no_sync`: one reduction for the sum of several backwards | `on_gradient` |
| `clipping.py` | one norm over all shards | your loop |
| `unused.py` | steps in which some parameters get no gradient | `reduce_gradients` |
| `replicas.py` | hybrid sharding: shards inside a node, replicas across nodes | `flatten`, `average` |
| `offload.py` | shards and optimizer in the host's memory | `make_shard`, `gather`, `deliver` |
| `meta.py` | a model that never exists whole | `ZeRO3Engine.partition` |
| `tensor_parallel.py` | parameters that tensor parallelism has split already; torch's pipelines | `EngineBucket` |
| `state_dict.py` | reading whole weights from an engine, and loading them into one | your loop |
| `checkpoint/` | sharded checkpoints that any stage and number of ranks can load | your loop |
| `checks.py` | errors instead of wrong results, at the build, in backward and in `step()` | `check`, `step` |
| `parameters.py` | parameters that raise an error if a freed weight or a moved gradient is read | `Engine.__init__` |
| `accelerator.py` | this machine's accelerator, for any build of torch | all files |
| `together.py` | calling a function on all ranks: all ranks raise the error of one rank | `check`, checkpoints |
"""

from zerolab.engine.loss_scaler import GradScaler
from zerolab.engine.zero1 import ZeRO1Engine
from zerolab.engine.zero2 import ZeRO2Engine
from zerolab.engine.zero3 import ZeRO3Engine

__all__ = ["GradScaler", "ZeRO1Engine", "ZeRO2Engine", "ZeRO3Engine"]
