"""The second half of the lesson: what real training adds to a chapter, one idea per file.

`ZeRO1Engine`, `ZeRO2Engine` and `ZeRO3Engine` are the chapters plus options. Without options an engine does what its
chapter does, to the bit and in the same collectives. It holds the same bytes, except for the optimizer's step counters,
of which it has one per piece of a parameter (groups.py).

| file | the idea | used in |
|---|---|---|
| `common.py` | what the three engines have in common | |
| `zero1.py`, `zero2.py`, `zero3.py` | an engine each: which option changes which moment of its chapter | |
| `life.py` | the life of a gradient: one value for all of them | `backward_began`, `reduce_gradients`, `step` |
| `backward_order.py` | which units are done, as backward moves from module to module | `ZeRO3Engine.before_backward` |
| `options.py` | the options, as the other files read them: `engine.options` | |
| `bucket.py` | what an option changes in a bucket, in a unit and in a reduction | `make_bucket`, `make_units` |
| `groups.py` | parameter groups: the optimizer gets one piece of the shard per parameter | `take_over_optimizer` |
| `optimizers.py` | several optimizers, such as Muon for the matrices and AdamW for the rest | `Engine.__init__` |
| `whole.py` | parameters that are never cut, for optimizers that look at whole matrices | `EngineBucket` |
| `precision.py` | compute in bfloat16, reduce in another dtype, keep shards in float32 | `EngineBucket` |
| `loss_scaler.py` | float16: one decision for all ranks about infinite gradients | your loop |
| `accumulation.py` | `no_sync`: several backwards, one reduction | `on_gradient` |
| `clipping.py` | one norm over all shards | your loop |
| `unused.py` | steps that leave parameters without a gradient | `reduce_gradients` |
| `replicas.py` | hybrid sharding: shards inside a node, replicas across nodes | `flatten`, `average` |
| `offload.py` | shards and optimizer in the host's memory | `make_shard`, `gather`, `deliver` |
| `meta.py` | a model that never exists whole | `ZeRO3Engine.partition` |
| `tensor_parallel.py` | parameters that tensor parallelism has split already; torch's pipelines | `EngineBucket` |
| `state_dict.py` | whole weights out of an engine and into one | your loop |
| `checkpoint/` | sharded checkpoints that any stage and number of ranks can load | your loop |
| `checks.py` | errors in place of wrong results, at the build, in backward and at `step()` | `check`, `step` |
| `parameters.py` | classes of parameters: reading a freed weight or a moved gradient is an error | `Engine.__init__` |
| `accelerator.py` | this machine's accelerator, for any build of torch | all of them |
| `together.py` | one function on all ranks; an error of one rank is an error of all | `check`, checkpoints |
"""

from zerolab.engine.loss_scaler import GradScaler
from zerolab.engine.zero1 import ZeRO1Engine
from zerolab.engine.zero2 import ZeRO2Engine
from zerolab.engine.zero3 import ZeRO3Engine

__all__ = ["GradScaler", "ZeRO1Engine", "ZeRO2Engine", "ZeRO3Engine"]
