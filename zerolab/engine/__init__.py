"""The second half of the lesson: what real training adds to a chapter, one idea per file.

`ZeRO1Engine`, `ZeRO2Engine` and `ZeRO3Engine` (stages.py) are the chapters plus options. Without options an engine does
what its chapter does, to the bit, to the byte and in the same collectives.

| file | the idea |
|---|---|
| `stages.py` | the three engines: which option changes which moment of a chapter |
| `bucket.py` | what an option changes in a bucket, in a unit and in a reduction |
| `groups.py` | parameter groups: the optimizer gets one piece of the shard per parameter |
| `precision.py` | compute in bfloat16, reduce in another dtype, keep shards in float32 |
| `loss_scaler.py` | float16: one decision for all ranks about infinite gradients |
| `accumulation.py` | `no_sync`: several backwards, one reduction |
| `clipping.py` | one norm over all shards |
| `unused.py` | steps that leave parameters without a gradient |
| `replicas.py` | hybrid sharding: shards inside a node, replicas across nodes |
| `offload.py` | shards and optimizer in the host's memory |
| `meta.py` | a model that never exists whole |
| `tensor_parallel.py` | parameters that tensor parallelism has split already; torch's pipelines |
| `state_dict.py` | whole weights out of an engine and into one |
| `checkpoint/` | sharded checkpoints that any stage and number of ranks can load |
| `checks.py` | errors in place of wrong results |
"""

from zerolab.engine.loss_scaler import GradScaler
from zerolab.engine.stages import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine

__all__ = ["GradScaler", "ZeRO1Engine", "ZeRO2Engine", "ZeRO3Engine"]
