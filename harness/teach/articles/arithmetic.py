"""Claims that are sums: recomputed from the articles' own numbers, or played through step by step."""

from functools import partial

import torch

from harness.teach.articles.claim import (
    FRAMEWORKS,
    SHARDING_STATE,
    Claim,
    about,
    gb,
    holds_when,
    verdict,
)
from harness.teach.articles.runs import gpt, parameters_of

GBIT, GIGA = 1e9 / 8, 1e9  # bytes


def all_reduce_seconds() -> tuple[str, str]:
    seconds = 2 * 7 / 8 * 14e9 / 25e9
    fp32 = 2 * 7 / 8 * 28e9 / 25e9
    measured = f"{seconds:.3g} s; {fp32:.3g} s with the float32 gradients of its own table"
    return measured, verdict(about(seconds, 9.8, 0.05) or about(fp32, 9.8, 0.05))


def infiniband() -> tuple[str, str]:
    rate = 200 * GBIT
    measured = f"200 Gbit/s are {rate / GIGA:g} GB/s; 8 such links {8 * rate / GIGA:g} GB/s"
    return measured, holds_when("200 GB/s is a node with 8 links", 8 * rate == 200 * GIGA, rate == 200 * GIGA)


def gradient_sync_seconds() -> tuple[str, str]:
    seconds = 140e9 / 8 / (200 * GBIT)
    return f"{140 / 8:g} GB at 25 GB/s: {seconds * 1e3:.0f} ms", verdict(about(seconds, 0.7))


def gradient_sync_bytes() -> tuple[str, str]:
    """What a rank sends to reduce-scatter the gradients over 8 replicas: its shard of 1/8 comes from 7 others."""
    whole = 7 / 8 * 140e9
    divided = 7 / 8 * 140e9 / 32  # among the 4 x 8 GPUs of tensor and pipeline parallelism, as in its own plan
    measured = f"reduce-scatter of 140 GB over 8: {gb(whole)} per rank; cut by 4-way TP x 8-way PP first: {gb(divided)}"
    return measured, verdict(about(whole, 17.5e9) or about(divided, 17.5e9))


def tensor_parallel_latency() -> tuple[str, str]:
    """Its own all-reduce formula over 4 GPUs of one node, for its own 20 MB of activations at its own 600 GB/s."""
    seconds = 2 * 3 / 4 * 20e6 / 600e9
    return f"its formula for its 20 MB, 4 GPUs, 600 GB/s: {seconds * 1e6:.0f} µs", verdict(seconds <= 200e-9)


def failures() -> tuple[str, str]:
    per_day = 1_000 * 0.01 / 100
    hours = 24 / per_day
    needed = 24 / 10 / 1_000
    measured = f"one every {hours:.0f} hours = {hours / 24:.0f} days; every 10 hours would take {needed:.2%} a day"
    return measured, verdict(about(hours, 10))


def straggler() -> tuple[str, str]:
    ranks = [100, 100, 140, 100]
    step = max(ranks)
    lost, longer = 1 - 100 / step, step / 100 - 1
    return f"a step takes {step} ms: {longer:.0%} more time, {lost:.1%} less throughput", verdict(
        about(lost, 0.4, 0.02)
    )


def straggler_sets_the_pace() -> tuple[str, str]:
    ranks = [100, 100, 140, 100]
    waiting = [max(ranks) - own for own in ranks]
    return f"steps of {max(ranks)} ms; the ranks wait {waiting} ms", verdict(max(ranks) == 140)


def pipeline(stages: int, micro_batches: int) -> tuple[int, int]:
    """(idle, all) time slots of GPipe's forward, played through: a stage runs one micro-batch per slot, in order."""
    done = [0] * stages  # micro-batches that each stage has finished
    idle = slots = 0
    while done[-1] < micro_batches:
        ready = [stage == 0 or done[stage - 1] > done[stage] for stage in range(stages)]
        works = [ready[stage] and done[stage] < micro_batches for stage in range(stages)]
        done = [count + work for count, work in zip(done, works)]
        idle += works.count(False)
        slots += stages
    return idle, slots


def bubble(stages: int, micro_batches: int, claimed: float, wasted_compute: bool) -> tuple[str, str]:
    """Against the share of all slots if the article speaks of wasted compute; else the ratio may be meant as well."""
    idle, slots = pipeline(stages, micro_batches)
    wasted, ratio = idle / slots, idle / (slots - idle)
    measured = f"{idle} of {slots} slots idle: {wasted:.1%} of the compute wasted; idle to busy {ratio:.1%}"
    as_share = about(wasted, claimed, 0.02)
    if wasted_compute:
        return measured, verdict(as_share)
    return measured, holds_when(
        "idle time is set against busy time, not all time", about(ratio, claimed, 0.02), as_share
    )


def interleaved(stages: int, micro_batches: int, chunks: int) -> tuple[float, int]:
    """(idle time in micro-batches, transfers between ranks) with `chunks` pieces of the model on each rank.

    Forward, played through: rank r has pieces r, r + stages, ...; it takes `stages` micro-batches through a piece
    and then through its next one, each 1/chunks as long.
    """
    order = [
        (chunk, start + offset)
        for start in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for offset in range(stages)
    ]
    finished, clock, transfers = {}, [0.0] * stages, 0
    for turn in range(len(order)):
        for rank in range(stages):
            chunk, micro_batch = order[turn]
            piece = chunk * stages + rank
            begin = max(clock[rank], finished.get((piece - 1, micro_batch), 0.0))
            finished[piece, micro_batch] = clock[rank] = begin + 1 / chunks
            transfers += piece > 0
    return max(clock) - micro_batches, transfers


def interleaving() -> tuple[str, str]:
    (idle, moves), (less, more) = interleaved(4, 8, 1), interleaved(4, 8, 2)
    measured = (
        f"4 stages, 8 micro-batches: idle for {idle:g} of 11 slots, interleaved in two {less:g} of {8 + less:g}; "
    )
    measured += f"{more / moves:.3g} times the transfers between stages"
    return measured, verdict(less == idle / 2)


def price_of_interleaving() -> tuple[str, str]:
    """What grows are the messages of activations from one stage to the next; an all-reduce is none of them."""
    (_, moves), (_, more) = interleaved(4, 8, 1), interleaved(4, 8, 2)
    measured = f"messages from stage to stage {moves} and {more}: times {more / moves:.3g}, and none is an all-reduce"
    return measured, verdict(about(more / moves, 2, 0.02))


def hourly_saves() -> tuple[str, str]:
    saves = 14 * 24
    low, high = (saves * minutes / 60 for minutes in (10, 20))
    return f"{saves} saves: {low:.0f} to {high:.0f} hours idle", verdict(low <= 5 <= high)


def save_every_thousand() -> tuple[str, str]:
    step = 4 * 3600 / 1000
    own = 1000 * 0.8 / 60  # 100 ms of compute and 700 ms of gradient sync: the step times that the article has
    measured = f"1,000 steps take 4 hours at {step:g} s a step; at 0.8 s (its 100 ms + 700 ms) {own:.0f} minutes"
    return measured, holds_when(f"a step takes about {step:.0f} s", about(1000 * step, 4 * 3600), about(own, 240))


def parts_of_140(ranks: int, claimed: float) -> tuple[str, str]:
    part = 2 * parameters_of("70b") / ranks
    measured = f"2 bytes x {parameters_of('70b'):,} parameters / {ranks} = {gb(part)}"
    return measured, verdict(about(part, claimed * 1e9, 0.02))


def boundary_activations() -> tuple[str, str]:
    """One tensor (tokens, width) in bfloat16 passes from a pipeline stage to the next."""
    with torch.device("meta"):
        config = gpt("70b").config
    sequence = 2 * config.seq * config.width
    tokens = 20e6 / (2 * config.width)
    measured = (
        f"{config.seq} tokens x {config.width} x 2 bytes = {sequence / 1e6:.1f} MB; 20 MB are {tokens:,.0f} tokens"
    )
    condition = "a micro-batch has about 1,200 tokens"
    return measured, holds_when(condition, about(2 * 1200 * config.width, 20e6, 0.05), about(sequence, 20e6, 0.05))


def gpus(*ways: int) -> tuple[str, str]:
    product = 1
    for way in ways:
        product *= way
    return f"{' x '.join(map(str, ways))} = {product}", verdict(product == 256)


def drawn_tensor_ranks() -> tuple[str, str]:
    """Its figure draws GPUs 0-3 as one pipeline stage and 4-7 as the next; its caption says 8-way in each."""
    drawn = len(range(0, 4))
    needed = 256 // (8 * 4)
    return f"{drawn} GPUs drawn per stage; 256 / (8 replicas x 4 stages) = {needed}", verdict(drawn == needed)


def fits_no_gpu() -> tuple[str, str]:
    weights = 2 * parameters_of("70b")
    return f"weights in bfloat16 {gb(weights)}, H100 80 GB", verdict(weights > 80e9)


def state_of_70b() -> tuple[str, str]:
    total = 16 * parameters_of("70b")
    measured = f"16 bytes x {parameters_of('70b'):,} = {total / 1e12:.3g} TB; an H200 has 141 GB"
    return measured, verdict(total > 141e9)  # the largest of the GPUs that the project knows


def offload_for_70b() -> tuple[str, str]:
    share = 16 * parameters_of("70b") / 8
    return f"state cut into 8: {gb(share)} per GPU of 40 GB", verdict(share > 40e9)


def two_h100() -> tuple[str, str]:
    """The article says that one is too few. Whether two are enough it does not say: that depends on the stage."""
    one = 16 * parameters_of("7b")
    stages = {"DDP": (16, 0), "ZeRO-1": (8, 8), "ZeRO-2": (4, 12), "ZeRO-3": (0, 16)}
    two = {name: parameters_of("7b") * (whole + cut / 2) for name, (whole, cut) in stages.items()}
    measured = f"state on one {gb(one)}, an H100 has 80 GB; on each of two " + ", ".join(
        f"{name} {gb(nbytes)}" for name, nbytes in two.items()
    )
    return f"{measured} (the article does not say that two are enough)", verdict(one > 80e9)


def always_more_than_one_gpu() -> tuple[str, str]:
    state = 16 * parameters_of("7b")
    measured = f"{gb(state)} of state; H100 80 GB, H200 141 GB"
    return measured, holds_when("the GPU has less than 112 GB", state > 80e9, state > 141e9)


def formula_of_two_and_twelve() -> tuple[str, str]:
    return f"2 + 12 = {2 + 12} bytes, not 16: the float32 master weights are missing", verdict(2 + 12 == 16)


def table_of_fourteen() -> tuple[str, str]:
    rows = {"parameters": 2, "gradients": 4, "momentum": 4, "variance": 4}
    total = sum(rows.values())
    ours = total * parameters_of("7b")
    same = about(ours, 112e9)
    return f"the rows add up to {total} bytes = {gb(ours)}; 16 bytes are {gb(16 * parameters_of('7b'))}", verdict(same)


def boxes_of_figure_two() -> tuple[str, str]:
    box = {"params": 2, "gradients": 4, "m": 4, "v": 4}
    state, whole = sum(box.values()), sum(box.values()) + 2
    measured = f"without activations {state}; with its '~2 bytes' of them {whole}"
    return measured, holds_when("its 2 bytes of activations are counted in", whole == 16, state == 16)


def exponent_bits() -> tuple[str, str]:
    ranges = {dtype: (torch.finfo(dtype).tiny, torch.finfo(dtype).max) for dtype in (torch.bfloat16, torch.float32)}
    (low, high), (low32, high32) = ranges.values()
    half = torch.finfo(torch.float16)
    names = ("bfloat16", "float32", "float16")
    shown = zip(names, (*ranges.values(), (half.tiny, half.max)))
    measured = ", ".join(f"{name} {lowest:.3g} to {highest:.4g}" for name, (lowest, highest) in shown)
    return measured, verdict(low == low32 and about(high, high32, 0.01) and half.max < high / 1e30)


def bf16_never_overflows() -> tuple[str, str]:
    def overflows(value: float, dtype) -> bool:
        return bool(torch.tensor(value, dtype=torch.float32).to(dtype).isinf())

    usual = [overflows(value, torch.bfloat16) for value in (65_520.0, 1e30)]
    largest = overflows(torch.finfo(torch.float32).max, torch.bfloat16)
    product = bool((torch.tensor(1e30, dtype=torch.bfloat16) * 1e10).isinf())
    measured = f"65,520 and 1e30 stay finite: {not any(usual)}; float32's largest number and 1e30 x 1e10 become inf: "
    condition = "the same run stays below 3.39e38, about where float32 ends too"
    return measured + f"{largest and product}", holds_when(condition, not any(usual), not (largest or product))


def fp16_and_the_scaler() -> tuple[str, str]:
    """The scaler multiplies the loss: good for gradients that are too small, no help for values that are too large."""
    scale = 2.0**16
    small = torch.tensor(1e-8)
    lost = small.half().item()
    saved = ((small * scale).half().float() / scale).item()
    large = torch.tensor(70_000.0)
    overflow, scaled = large.half().item(), (large * scale).half().item()
    measured = f"1e-8: {lost:g} in float16, {saved:.3g} through a scaled loss; 70,000: {overflow}, scaled {scaled}"
    return measured, verdict(torch.isfinite(torch.tensor(scaled)).item())


def fp16_overflows() -> tuple[str, str]:
    values = {value: torch.tensor(value).half().item() for value in (65_504.0, 70_000.0)}
    measured = ", ".join(f"{value:,.0f} becomes {half:g}" for value, half in values.items())
    return measured, verdict(values[70_000.0] == float("inf") and values[65_504.0] == 65_504)


_SUM = "its own numbers, recomputed"
_COUNTED = "parameters of the 70b preset counted (86 blocks of width 8192)"
CLAIMS = [
    Claim(FRAMEWORKS, "params x 2 + params x 12 make 16 bytes per parameter", _SUM, formula_of_two_and_twelve),
    Claim(FRAMEWORKS, "its mixed-precision table gives the 112 GB that the text names",
          "the rows of the table added up", table_of_fourteen),
    Claim(FRAMEWORKS, "DDP in its figure 2: 16 bytes per parameter",
          "the boxes of the figure added up", boxes_of_figure_two),
    Claim(FRAMEWORKS, "70B in bfloat16 is 140 GB and no H100 holds it", _COUNTED, fits_no_gpu),
    Claim(FRAMEWORKS, "7B needs at least two H100", "16 bytes x the 7b preset, on one and on two", two_h100),
    Claim(FRAMEWORKS, "7B is always more than one GPU can hold", "16 bytes x the 7b preset", always_more_than_one_gpu),
    Claim(FRAMEWORKS, "70B on 8 GPUs of 40 GB needs offloading", "16 bytes x the 70b preset / 8", offload_for_70b),
    Claim(FRAMEWORKS, "an all-reduce of 14 GB over 8 ranks at 25 GB/s takes 9.8 s",
          "its own formula", all_reduce_seconds),
    Claim(FRAMEWORKS, "InfiniBand's 200 Gbps (25 GB/s) in one place are its ~200 GB/s in another",
          "the units converted", infiniband),
    Claim(FRAMEWORKS, "17.5 GB over 200 Gbps take 700 ms", _SUM, gradient_sync_seconds),
    Claim(FRAMEWORKS, "syncing 140 GB of gradients over 8 replicas sends 140 GB / 8",
          "reduce-scatter's (N-1)/N", gradient_sync_bytes),
    Claim(FRAMEWORKS, "a tensor-parallel all-reduce takes ~200 ns on NVLink",
          "its own formula, bytes and bandwidth", tensor_parallel_latency),
    Claim(FRAMEWORKS, "pipeline stages of 70B pass ~20 MB on per micro-batch",
          "tokens x width x 2 bytes", boundary_activations),
    Claim(FRAMEWORKS, "1,000 GPUs failing at 0.01% a day: a failure every 10 hours", _SUM, failures),
    Claim(FRAMEWORKS, "one rank at 140 ms instead of 100 makes every step 140 ms",
          "the slowest of its four ranks", straggler_sets_the_pace),
    Claim(FRAMEWORKS, "one rank at 140 ms instead of 100 loses 40% of the throughput", _SUM, straggler),
    Claim(FRAMEWORKS, "4 stages, 8 micro-batches: 37.5% of the compute wasted",
          "the schedule played through, idle slots counted", partial(bubble, 4, 8, 0.375, True)),
    Claim(FRAMEWORKS, "8 stages, 16 micro-batches: a bubble of 44%",
          "the schedule played through, idle slots counted", partial(bubble, 8, 16, 0.44, False)),
    Claim(FRAMEWORKS, "interleaving halves the pipeline's bubble", "both schedules played through", interleaving),
    Claim(FRAMEWORKS, "the price of interleaving is twice the communication, in all-reduces",
          "both schedules played through, messages between stages counted", price_of_interleaving),
    Claim(FRAMEWORKS, "two weeks of hourly saves of 10-20 minutes waste about 5 hours", _SUM, hourly_saves),
    Claim(FRAMEWORKS, "a save every 1,000 steps is one every ~4 hours", _SUM, save_every_thousand),
    Claim(FRAMEWORKS, "140 GB over 64 ranks are writes of 2.2 GB",
          _COUNTED, partial(parts_of_140, 64, 2.2)),
    Claim(FRAMEWORKS, "140 GB over 256 GPUs are 0.55 GB each",
          _COUNTED, partial(parts_of_140, 256, 0.55)),
    Claim(FRAMEWORKS, "8 DP x 4 PP x 8 TP = 256 GPUs = 32 nodes of 8", _SUM, partial(gpus, 8, 4, 8)),
    Claim(FRAMEWORKS, "4-way TP x 8-way PP x 8-way DP = 256 GPUs", _SUM, partial(gpus, 4, 8, 8)),
    Claim(FRAMEWORKS, "its figure 3 shows 8-way tensor parallelism",
          "GPUs drawn per stage, counted", drawn_tensor_ranks),
    Claim(FRAMEWORKS, "bfloat16 has the range of float32", "torch.finfo", exponent_bits),
    Claim(FRAMEWORKS, "bfloat16 never overflows", "large numbers cast and multiplied", bf16_never_overflows),
    Claim(FRAMEWORKS, "float16 overflows easily", "numbers around 65,504 cast", fp16_overflows),
    Claim(FRAMEWORKS, "a loss scaler is for float16's overflow",
          "a small and a large number, with and without a scale", fp16_and_the_scaler),
    Claim(SHARDING_STATE, "the state of 70B (its size is blank in our copy) cannot be replicated on a GPU",
          "16 bytes x the 70b preset", state_of_70b),
]  # fmt: skip
