"""Each line of the source that keeps an order on a GPU: (module, the line, what is in its place without it, where).

Where: {stage: the options of a run that misses the line}. What `Engine.receive` and `Placement.finish` keep besides is
whose gradients a step adds up: properties hold that without a GPU. That ZeRO-3 allocates on the stream that computes is
no such line: the stream of copies waits for that one anyway. It is so that both share memory.
"""

import torch

OFFLOAD, REPLICAS = {"offload": True}, {"replicas": True}
LOW_OFFLOAD = {**OFFLOAD, "param_dtype": torch.bfloat16}
OF_ALL = dict.fromkeys(("zero1", "zero2", "zero3"), OFFLOAD)
PLACEMENT, UNIT = "zerolab.engine.options.placement", "zerolab.engine.bucket"
WAIT, REPLICAS_WAIT = "work.wait()\n", "self._sum_of_replicas(bucket, shard)"
STEP_5 = ("zero1", "for work in works:\n        work.wait()", "for work in works:\n        pass")

OF_CHAPTERS = {
    "step 5 waits": (*STEP_5, {"zero1": {}, "zero2": {}}),
    "step 3 waits in ZeRO-1": ("zero1", "work.wait()  # on a CPU", "pass  # on a CPU", {"zero1": {}}),
    "step 3 waits": ("zero2", f"self.{WAIT}        self.flat = None", "self.flat = None", {"zero2": {}, "zero3": {}}),
    "a gather is waited for": ("zero3", f"self.{WAIT}            self.work = None", "self.work = None", {"zero3": {}}),
    "forward waits": (
        "zero3",
        "unit.following):\n            each.start_gather()\n        unit.wait()",
        "unit.following):\n            each.start_gather()",
        {"zero3": {}},
    ),
    "backward waits": (
        "zero3",
        "if each.missing:\n                each.start_gather()\n        unit.wait()",
        "if each.missing:\n                each.start_gather()",
        {"zero3": {}},
    ),
    "what is freed was waited for": ("zero3", "self.wait()  # never free", "pass  # never free", {"zero3": {}}),
}

OF_ENGINES = {
    "step 5 waits": (*STEP_5, {"zero1": {}, "zero2": {}}),
    "step 3 waits in ZeRO-1": (
        "zerolab.engine.stages",
        f"{WAIT}            total.div_",
        "total.div_",
        {"zero1": {}},
    ),
    "step 3 waits": (
        "zerolab.engine.bucket",
        f"self.{WAIT}        self.flat = None",
        "self.flat = None",
        {"zero2": {}, "zero3": OFFLOAD},
    ),
    "a gather is waited for": (UNIT, "self.works.pop(0).wait()", "self.works.pop(0)", {"zero3": {}}),
    "forward and backward wait": ("zerolab.engine.unit_life", "unit.wait()", "pass", {"zero3": {}}),
    "what is freed was waited for": (UNIT, "self.wait()  # never free", "pass  # never free", {"zero3": {}}),
    "replicas": (
        PLACEMENT,
        f"self._in_flight, None\n            {WAIT}",
        "self._in_flight, None\n",
        {"zero2": REPLICAS, "zero3": REPLICAS},
    ),
    "replicas in ZeRO-1": (
        PLACEMENT,
        f"{REPLICAS_WAIT}.wait()",
        REPLICAS_WAIT,
        {"zero1": REPLICAS},
    ),
    "the host adds": (PLACEMENT, "self._down.synchronize()", "pass", {"zero2": OFFLOAD, "zero3": OFFLOAD}),
    "the host updates at all": (PLACEMENT, "self._device.synchronize()", "pass", OF_ALL),
    "the host updates": (
        "zerolab.engine.base",
        "self.placement.finish_all()",
        "self.placement.finish()",
        OF_ALL,
    ),
    "copies up wait": (PLACEMENT, "self._up.wait_stream(self._device.current_stream())", "pass", {"zero3": OFFLOAD}),
    "copies down wait": (PLACEMENT, "self._down.wait_stream(self._device.current_stream())", "pass", OF_ALL),
    "memory is kept for copies down": (
        PLACEMENT,
        "shard.record_stream(self._down)",
        "pass",
        {"zero1": LOW_OFFLOAD, "zero2": OFFLOAD, "zero3": OFFLOAD},
    ),
}

# Who loads, a whole state or a checkpoint, writes into the shards here.
_WRITES = "    with torch.no_grad():\n        for place, value in values:"
OF_LOADING = {
    "the host loads": ("zerolab.engine.state", f"    engine.placement.finish_all()\n{_WRITES}", _WRITES, OF_ALL),
}


def each(table: dict) -> dict[str, tuple]:
    """{name: (module, the line, what is in its place, stage, options)} of a table above."""
    found = {}
    for name, (*change, where) in table.items():
        for stage, options in where.items():
            found[f"{name}, {stage}"] = (*change, stage, options)
    return found
