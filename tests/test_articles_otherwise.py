"""Every verdict on time, checkpoints and stragglers follows from what is found: other findings, another verdict."""

import json
from dataclasses import replace

import pytest

from harness.plan.predict import predict
from harness.teach.articles import CLAIMS, choices, implementations, network, pipelines, planned, saving, stragglers

FAST = replace(planned.H100, per_node=1 << 20, intra_gbps=1e6, latency=0.0)  # a network that takes no time
SLOW = replace(planned.H100, intra_gbps=20)
DETACHED = replace(planned.H100, gpu=replace(planned.GPUS["h100"], fp32=1e6))  # better in float32
LAZY = replace(planned.H100, efficiency=0.05)


def on(cluster):
    """`predicted`, always on this cluster. The recordings are those of the other tests."""
    return lambda setup, _=None: predict(setup, cluster)


def needing(gigabytes: float):
    return lambda setup, _=None: replace(
        planned.predicted(setup), needed_bytes=gigabytes * 1e9, fits=gigabytes < 80, peak_bytes=gigabytes * 1e9
    )


def rewritten(path, change):
    """A function that writes a changed copy of a recorded file, and returns its path."""

    def write(folder):
        copy = folder / path.name
        copy.write_text(change(path.read_text()))
        return copy

    return write


def own_time_in_the_step(text: str) -> str:
    found = json.loads(text)
    for run in found["runs"].values():
        for rank in run["step_time"]["ranks"]:
            rank["step_ms"] = rank["own_ms"]
    return json.dumps(found)


def survivors(text: str) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if "processes" in line:
            line["processes"][0] = "vm:1"
        if "repeated" in line:
            line["repeated"] = 0
    return "\n".join(map(json.dumps, lines))


def never_fewer(text: str) -> str:
    return text.replace('"ranks": 1', '"ranks": 2')


def unreadable(*args, **kwargs):
    raise ValueError("a sum is wrong")


CASES = (  # claim's check, the module's name that is changed, to what, the verdict then
    (network.serialized, "predicted", on(FAST), "does not hold"),
    (network.topology, "predicted", on(FAST), "does not hold"),
    (network.nvlink_hides, "predicted", on(SLOW), "does not hold"),
    (network.nvlink_hides, "predicted", on(FAST), "holds"),
    (network.infiniband_matters, "predicted", on(FAST), "does not hold"),
    (network.waiting_more_than_computing, "predicted", on(FAST), "does not hold"),
    (network.fast_links, "predicted", on(FAST), "does not hold"),
    (network.tensor_parallel_between_nodes, "H100", FAST, "does not hold"),
    (network.layer_of_70b, "predicted", on(LAZY), "does not hold"),
    (network.only_three_dimensions, "predicted", on(FAST), "does not hold"),
    (network.lower_mfu_is_communication, "replay", lambda *_: pipelines.Replay(0.0, 1), "holds"),
    (network.fifteen_per_cent, "predicted", on(FAST), "does not hold"),
    (network.nvlink_bandwidth, "GPUS", {name: planned.GPUS["a100"] for name in ("a100", "h100")}, "holds"),
    (choices.bert, "predicted", needing(1), "holds"),
    (choices.bert, "predicted", needing(100), "does not hold"),
    (choices.activations_run_out, "predicted", needing(15), "does not hold"),
    (choices.activations_run_out, "predicted", needing(100), "holds"),
    (choices.when_ddp_breaks, "predicted", needing(1), "does not hold"),
    (choices.ddp_for_what_fits, "published_rows", lambda *_: {(8, 1): 1.0}, "does not hold"),
    (choices.fsdp_for_all_that_is_larger, "published_rows", lambda *_: {}, "holds"),
    (choices.larger_batches, "predicted", needing(1), "does not hold"),
    (choices.larger_batches, "predicted", needing(100), "does not hold"),
    (choices.worth_the_cost, "predicted", on(FAST), "does not hold"),
    (choices.worth_the_cost, "predicted", on(SLOW), "holds"),
    (choices.accumulation_for_memory, "predicted", needing(1), "does not hold"),
    (choices.bf16_for_speed, "predicted", on(DETACHED), "does not hold"),
    (choices.trillions, "predicted", needing(1), "holds"),
    (choices.trillions, "predicted", needing(100), "does not hold"),
    (choices.sweet_spot, "predicted", needing(1), "does not hold"),
    (choices.sweet_spot, "predicted", on(FAST), "does not hold"),
    (
        implementations.fsdp1_beside_fsdp2,
        "step",
        lambda _, model: implementations.Step("fsdp2", model),
        "does not hold",
    ),
    (implementations.units_by_size, "H100", replace(planned.H100, latency=0.0), "holds"),
    (implementations.complexity, "statements", lambda *_: 10, "does not hold"),
    (pipelines.gpipe_and_naive, "MICRO_BATCHES", 1, "does not hold"),
    (pipelines.pipedream, "STAGES", 1, "does not hold"),
    (pipelines.more_micro_batches, "STAGES", 1, "does not hold"),
    (stragglers.per_rank_step_times, "SLOW_RUN", rewritten(stragglers.SLOW_RUN, own_time_in_the_step), "holds"),
    (stragglers.uneven_lengths, "lengths", lambda: [100] * 1600, "does not hold"),
    (stragglers.bucketing, "lengths", lambda: [100] * 1600, "does not hold"),
    (stragglers.accumulation, "time_per_micro_batch", lambda together, moving: 1.4, "does not hold"),
    (stragglers.fast_ranks_run_ahead, "TIMES", (100,) * 4, "does not hold"),
    (stragglers.sensitive_to_old_gradients, "TIMES", (100,), "does not hold"),
    (stragglers.left_over, "used", lambda number, every: range(number), "holds"),
    (saving.fragile, "dcp.load", unreadable, "does not hold"),
    (saving.share_of_each_rank, "shares", lambda *_: [0.25] * 4, "holds"),
    (saving.share_of_each_rank, "shares", lambda *_: [1.0, 0, 0, 0], "does not hold"),
    (saving.five_seconds, "WRITERS", 256, "holds"),
    (saving.five_seconds, "BY_RANKS", 1, "does not hold"),
    (saving.thirty_seconds, "EVERYTHING", 2, "does not hold"),
    (saving.synchronous_saves, "BY_RANKS", 1200, "holds"),
    (saving.remove_a_rank, "RUN", rewritten(saving.RUN, survivors), "holds"),
    (saving.remove_a_rank, "RUN", rewritten(saving.RUN, never_fewer), "does not hold"),
)


@pytest.mark.parametrize("check, name, other, verdict", CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_other_findings_give_another_verdict(check, name, other, verdict, monkeypatch, tmp_path):
    if name in ("SLOW_RUN", "RUN"):
        other = other(tmp_path)
    monkeypatch.setattr(f"{check.__module__}.{name}", other)
    assert check()[1] == verdict


def test_every_claim_of_these_files_is_among_the_cases():
    files = {module.__name__ for module in (choices, implementations, network, pipelines, saving, stragglers)}
    assert {claim.check for claim in CLAIMS if claim.check.__module__ in files} == {case[0] for case in CASES}


@pytest.mark.parametrize("order", (pipelines.all_forward_first, pipelines.one_forward_one_backward))
@pytest.mark.parametrize("stages, micro_batches", ((1, 3), (2, 1), (3, 7), (8, 16)))
def test_replayed_pipelines_idle_as_the_formula_says(order, stages, micro_batches):
    found = pipelines.replay(order, stages, micro_batches)
    assert found.idle == pytest.approx((stages - 1) / (stages - 1 + micro_batches))
    one_by_one = order is pipelines.one_forward_one_backward
    assert found.kept == (min(stages, micro_batches) if one_by_one else micro_batches)
