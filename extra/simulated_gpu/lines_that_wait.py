"""Each line of the source that keeps operations on a GPU in order: (module, the line, its replacement, where).

Where: {stage: the options of a run that fails without the line}. Engines inherit the chapters' lines.
"""

OFFLOAD = {"offload": True}
OF_ALL = dict.fromkeys(("zero1", "zero2", "zero3"), OFFLOAD)
WAIT = "work.wait()\n"

OF_CHAPTERS = {
    "step 5 waits": (
        "zero1",
        "for work in works:\n        work.wait()",
        "for work in works:\n        pass",
        {"zero1": {}, "zero2": {}},
    ),
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
    "an update waits for gathers": (
        "zero3",
        'self.free_all()\n        with record_function("step 4',
        'with record_function("step 4',
        {"zero3": {}},
    ),
}

UNIT, STAGES = "zerolab.engine.bucket", "zerolab.engine.stages"
OF_ENGINES = {
    **OF_CHAPTERS,
    "a unit waits": (UNIT, "super().wait()\n", "super().wait\n", {"zero3": {}}),
    "loaded weights are gathered": (
        STAGES,
        f"self.all_buckets]:\n            {WAIT}",
        "self.all_buckets]:\n            pass\n",
        {"zero1": {}, "zero2": {}},
    ),
    "the host adds": (
        UNIT,
        "offload.wait_for_copies(shard.device)  # the host adds",
        "pass  # the host adds",
        {"zero2": OFFLOAD, "zero3": OFFLOAD},
    ),
    "the host updates": (STAGES, "offload.wait_for_copies(self.buckets[0].flat.device)", "pass", OF_ALL),
    "the host updates once": (  # it waits for gradients, but not for shards that are copied up after that
        STAGES,
        "            self.set_moved(True)\n        if self.options.offload_policy is not None:\n",
        "            self.set_moved(True)\n        else:\n            return\n"
        "        if self.options.offload_policy is not None:\n",
        {"zero3": OFFLOAD},
    ),
    "the host reads a new shard": (  # at the end of a build of ZeRO-3 the ranks agree, for which the host waits anyway
        UNIT,
        "offload.wait_for_copies(self.flat.device)",
        "pass",
        {"zero1": OFFLOAD, "zero2": OFFLOAD},
    ),
}

# A whole state or a checkpoint is written into the shards here.
WAIT_TO_LOAD = "offload.wait_for_copies(engine.all_buckets[0].flat.device)"
OF_LOADING = {
    "a state is loaded": ("zerolab.engine.state_dict", WAIT_TO_LOAD, "pass", OF_ALL),
    "a checkpoint is loaded": ("zerolab.engine.checkpoint.loading", WAIT_TO_LOAD, "pass", OF_ALL),
}


def each(table):
    """{name: (module, the line, what takes its place, stage, options)} of a table above."""
    found = {}
    for name, (*change, where) in table.items():
        for stage, options in where.items():
            found[f"{name}, {stage}"] = (*change, stage, options)
    return found
