"""What the claims about time share: the predictions of `./launch.sh plan`, each made once. None is a measurement.

docs/planner.md says what the planner assumes, and how far it is from published measurements: 5% in the median, up to
18% for tokens per second.
"""

import functools
from dataclasses import replace

from harness.plan.hardware import GPUS, Cluster
from harness.plan.one_rank import Setup
from harness.plan.predict import Prediction, predict
from harness.run.model import GPTConfig, preset

H100 = Cluster(GPUS["h100"])  # nodes of 8, 400 GB/s of network each
ISLAND = replace(H100, per_node=128)  # all of 128 GPUs linked as those in a node are
PCIE = Cluster(replace(GPUS["h100"], nvlink=False, link_gbps=64))  # generation 5, no other link
ASSUMED = "H100 in nodes of 8 with 400 GB/s of network, bfloat16, 2,048 tokens per sequence"


@functools.cache
def predicted(setup: Setup, cluster: Cluster = H100) -> Prediction:
    """The same setup on another cluster costs no new recording."""
    return predict(setup, cluster)


def setup(name: str | GPTConfig, engine: str, ranks: int, **options) -> Setup:
    """`name`: a preset's, or a shape."""
    return Setup(preset(name) if isinstance(name, str) else name, engine, ranks, **options)


def long(name: str | GPTConfig, ranks: int, engine: str = "zero3") -> Setup:
    """Four sequences per rank, blocks recomputed: as much as large models have at a time."""
    return setup(name, engine, ranks, micro_batch=4, recompute="blocks")


def ms(prediction: Prediction) -> str:
    return f"{prediction.step * 1e3:,.0f} ms"
