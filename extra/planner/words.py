"""A plan as text: the table of predictions, the recommendation with its reason, and the assumptions."""

from collections.abc import Sequence

from extra.planner.hardware import GB, Cluster
from extra.planner.one_rank import ENGINES
from extra.planner.predict import Prediction
from extra.planner.published import ROWS
from zerolab.measure import tables
from zerolab.measure.gpus import CONTEXT_BYTES, GAPS
from zerolab.run import engines as registry

# The paper's ZeRO-1 is in the same table, so the chapter's title names it.
TITLES = {name: engine.title for name, engine in registry.ENGINES.items()} | {"zero1": "ZeRO-1 (the chapter's, 3Ψ)"}
PUBLISHED = {row.setup.engine for row in ROWS}
FITTED = {row.gpu for row in ROWS if row.one_node}
SAME = 0.02  # step times that differ by less count as equal, because the model is not more accurate


def gpus(ranks: int | str, cluster: Cluster) -> str:
    """ "8 x a100 (80 GB)": the number, kind and memory of the GPUs."""
    return f"{ranks} x {cluster.gpu.name} ({cluster.gpu.memory_gb:g} GB)"


def table(predictions: Sequence[Prediction]) -> str:
    """A row per engine. A dagger marks engines without a published row to compare with. A GB has 10^9 bytes."""
    rows = [("engine", "live GB", "reserved GB", "needed GB", "fits", "step ms", "exposed", "tokens/s/GPU", "MFU")]
    for found in predictions:
        name = found.setup.engine
        rows.append((
            name + " †" * (name not in PUBLISHED), f"{found.peak_bytes / GB:.1f}", f"{found.reserved_bytes / GB:.1f}",
            f"{found.needed_bytes / GB:.1f}",
            "yes" if found.fits else "no", f"{found.step * 1e3:,.0f}", f"{found.exposed:.0%}",
            f"{found.tokens_per_s:,.0f}", f"{found.mfu:.1%}",
        ))  # fmt: skip
    lines = tables.text(rows)
    del lines[1]  # the rule under the first row
    if any("†" in row[0] for row in rows):
        lines.append("† no published measurement to check this engine against")
    return "\n".join(lines)


def choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest engine that fits; among equals the first one in `ENGINES`. None if nothing fits."""
    fitting = [found for found in predictions if found.fits]
    if not fitting:
        return None
    best = min(found.step for found in fitting)
    equals = [found for found in fitting if found.step <= best * (1 + SAME)]
    return min(equals, key=lambda found: ENGINES.index(found.setup.engine))


def recommendation(predictions: Sequence[Prediction], cluster: Cluster) -> str:
    """One or two sentences: the recommended engine, and how it compares with faster ones."""
    chosen = choose(predictions)
    if chosen is None:
        least = min(predictions, key=lambda found: found.needed_bytes)
        more = f"{least.needed_bytes / GB:.0f} GB of {cluster.gpu.memory_gb:.0f}"
        ways = ["more ranks", "a smaller micro-batch" if least.setup.micro_batch > 1 else "shorter sequences"]
        if least.setup.recompute == "none":
            ways.insert(0, "--checkpoint-activations blocks")
        return f"Nothing fits: {TITLES[least.setup.engine]} needs least, {more}. Try {' or '.join(ways)}."
    name = TITLES[chosen.setup.engine]
    if len(predictions) == 1:
        return f"{name} fits."
    fastest = min((found for found in predictions if found.fits), key=lambda found: found.step)
    text = f"{name}: the fastest that fits"
    if fastest is not chosen:
        text = (f"{name}: within {SAME:.0%} of the fastest, {TITLES[fastest.setup.engine]}, which counts as equal. "
                f"Of equals it is the first in the order {', '.join(ENGINES)}")  # fmt: skip
    best = min(predictions, key=lambda found: found.step)
    if not best.fits and best.step < chosen.step * (1 - SAME):
        slower = chosen.step / best.step - 1
        text += f", and {slower:.0%} slower than {TITLES[best.setup.engine]}, which does not fit"
    return text + "."


def changed(before: Prediction | None, after: Prediction | None, condition: str, alone: bool = False) -> str:
    """The recommendation under a different condition. `alone`: there is only one engine to choose from."""
    if after is None:
        return f"With {condition} nothing fits."
    name = TITLES[after.setup.engine]
    if alone and before is not None:
        return f"With {condition}: {after.tokens_per_s / before.tokens_per_s - 1:+.0%} tokens/s per GPU."
    if before is not None and after.setup.engine == before.setup.engine:
        ratio = after.tokens_per_s / before.tokens_per_s - 1
        return f"With {condition} it stays {name}, with {ratio:+.0%} tokens/s per GPU."
    return f"With {condition} it would be {name}."


def assumptions(cluster: Cluster) -> str:
    """The assumptions of the prediction, in a few lines."""
    gpu, share, network = cluster.gpu, cluster.efficiency or cluster.gpu.efficiency, cluster.between
    origin = "as given" if cluster.efficiency else "fitted" if gpu.name in FITTED else "assumed, not fitted"
    return "\n".join([
        "Predicted, not measured. Assumed:",
        f"  {gpu.name}: matrix products at {share:.0%} of the peak ({origin}), flash attention at "
        f"{gpu.attention:.0%} at best, the rest at {cluster.memory_efficiency:.0%} of {gpu.memory_gbps:,.0f} GB/s",
        f"  a collective takes hops x latency + bytes / bandwidth: in a node of {cluster.per_node} "
        f"{cluster.alpha_inside * 1e6:.1f} us and links of {cluster.intra_gbps or gpu.link_gbps:g} GB/s; across nodes "
        f"({cluster.network}) {network.alpha * 1e6:g} us and {network.bus:g} GB/s"
        + (f", and with each further node {network.crowding[0]:.0%} more for a byte" if network.crowding[0] else ""),
        f"  the host {cluster.launch * 1e6:.0f} us per kernel",
        f"  during a collective, computation takes {cluster.slowdown:.0%} longer",
        "  reserved: what torch's caching allocator takes while there is room, by a model of it. Short of room it",
        "  first returns the blocks that nothing uses, so a step can run with less",
        f"  needed: live bytes, {GAPS:.0%} for the allocator's gaps, {CONTEXT_BYTES / GB:.0f} GB for CUDA and NCCL",
        "  fits: whether the GPU has what is needed; exposed: the share of the step in which it waits for what is sent",
        "  every rank does the same at the same time: no stragglers, no loading of data, no checkpoints, no clipping",
    ])  # fmt: skip
