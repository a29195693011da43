"""The planner: the replay against closed forms, the events against the engines, and the command."""

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from typed_commands import mistake

from extra.planner import __main__ as command
from extra.planner import page
from extra.planner.events import Collective, Operation, Recording, Wait
from extra.planner.hardware import FLASH, GPUS, NETWORKS, TOKENS, Cluster, flash
from extra.planner.plan_options import arguments
from extra.planner.predict import Prediction, predict
from extra.planner.published import FOUNDRY, PLAYBOOK, ROWS
from extra.planner.recorder import record
from extra.planner.replay import Times, replay
from extra.planner.setup import Setup
from zerolab.measure import memory
from zerolab.measure.gpus import needed_bytes
from zerolab.measure.traffic import sent_bytes
from zerolab.run.model import GPT, GPTConfig, preset

SMALL = GPTConfig(3, 64, 4, vocab=128, seq=32, kv_heads=2, ffn=96, gated=True, tied=False, bias=False)
H100 = Cluster(GPUS["h100"])
EFA = Cluster(GPUS["h100"], network=NETWORKS["efa"])


# The replay.


@dataclass(frozen=True)
class Plain:
    """An operation takes its FLOPs in seconds, a collective its bytes."""

    launch: float = 0.0
    issue: float = 0.0
    slowdown: float = 0.0
    seconds = staticmethod(lambda operation: operation.flops)
    collective_seconds = staticmethod(lambda collective: collective.nbytes)


def compute(seconds):
    return Operation("mm", seconds, 0)


def gather(nbytes, ranks=8):
    return Collective("all-gather", nbytes, ranks)


WAIT = Wait("all-gather")


@pytest.mark.parametrize(
    "events, step, exposed",
    [
        ([compute(3), compute(4)], 7, 0),
        ([gather(5), WAIT, compute(4)], 9, 5),  # nothing to do meanwhile
        ([gather(5), compute(4), WAIT, compute(2)], 7, 1),
        ([gather(3), compute(4), WAIT, compute(2)], 6, 0),
        ([compute(4), gather(5), WAIT], 9, 5),  # it begins when the operations before it are over
        ([gather(5), gather(2), compute(1), WAIT, WAIT], 7, 6),  # one after the other
        ([gather(5), gather(9), WAIT, compute(1)], 14, 13),  # waits for the first one only
        ([gather(9), compute(5)], 9, 4),  # nobody waits for it, but the step is not over before
        # Three units, each gathered while the one before it computes: only the first is waited for.
        ([gather(2)] + [gather(2), WAIT, compute(5)] * 2 + [WAIT, compute(5)], 17, 2),
    ],
)
def test_a_step_of_few_events_takes_as_long_as_computed_by_hand(events, step, exposed):
    times = replay(events, Plain())
    assert (times.step, times.exposed) == (step, exposed)
    assert times.compute == sum(event.flops for event in events if isinstance(event, Operation))
    assert times.communication == sum(event.nbytes for event in events if isinstance(event, Collective))


TEN = [compute(1)] * 10


@pytest.mark.parametrize(
    "events, costs, step",
    [
        ([gather(6), compute(10)], {"slowdown": 0.5}, 6 + (10 - 6 / 1.5)),  # slower during the collective, ...
        ([gather(6), WAIT, compute(10)], {"slowdown": 0.5}, 16),  # ... and only there
        (TEN, {"launch": 3}, 10 * 3 + 1),  # the GPU waits for a slow host
        (TEN, {"launch": 0.5}, 0.5 + 10),
        ([compute(50), *TEN], {"launch": 3}, 3 + 50 + 10),  # the host issues the others while the first one runs
        ([gather(1), WAIT, compute(1)], {"issue": 7, "launch": 2}, 9 + 1),
    ],
)
def test_the_host_and_collectives_slow_computation_down(events, costs, step):
    assert replay(events, Plain(**costs)).step == pytest.approx(step)


# Hardware.


def test_a_collective_takes_hops_times_latency_and_bytes_over_bandwidth():
    alpha = NETWORKS["infiniband"].alpha
    for ranks in (16, 128, 512):
        for nbytes in (0, 10**6, 10**10):
            sent, hops = nbytes * (ranks - 1) / ranks, (ranks - 1) * alpha
            crowded = 1 + NETWORKS["efa"].crowding[0] * (ranks / 8 - 1)  # with every further node
            assert H100.collective_seconds(gather(nbytes, ranks)) == pytest.approx(hops + sent / 350e9)
            assert EFA.collective_seconds(gather(nbytes, ranks)) == pytest.approx(hops + sent / 350e9 * crowded)
            own = replace(H100, inter_gbps=50)
            assert own.collective_seconds(gather(nbytes, ranks)) == pytest.approx(hops + sent / 50e9)
    in_a_node = 7 * 44e-6 / 14 + 7 / 8 * 10**10 / 361e9
    assert H100.collective_seconds(gather(10**10)) == pytest.approx(in_a_node)
    assert replace(EFA, inter_gbps=1).collective_seconds(gather(10**10)) == pytest.approx(in_a_node)
    assert H100.collective_seconds(gather(10**9, ranks=1)) == 0


def test_an_all_reduce_takes_a_tree_where_that_is_faster():
    """The latency of a tree grows with the logarithm of the nodes, and its bandwidth is a little less than a ring's."""

    def seconds(nbytes, nodes):
        return H100.collective_seconds(Collective("all-reduce", nbytes, 8 * nodes))

    small = [seconds(1000, nodes) for nodes in (16, 64, 256)]
    assert small[1] - small[0] == pytest.approx(small[2] - small[1], rel=1e-3)  # two doublings each
    assert small[0] < 2 * H100.collective_seconds(gather(1000, 128))
    assert seconds(10**11, 2) == pytest.approx(2 * H100.collective_seconds(gather(10**11, 16)))


def test_flash_attention_reaches_the_published_rates():
    """Forward at the paper's points. Backward is slower, and the last rate also holds for longer sequences."""
    for size, (forward, _, _) in FLASH.items():
        for tokens, rate in zip(TOKENS, forward):
            assert GPUS["h100"].attention * flash(size, tokens, False) * 989 == pytest.approx(rate, rel=0.01)
            assert flash(size, tokens, True) < flash(size, tokens, False)
    assert flash(64, 2048, False) < flash(96, 2048, False) < flash(128, 2048, False)
    assert flash(128, 10**6, True) == flash(128, 16_384, True)


# The events of the real engines.


@cache
def recorded(engine, **changed) -> Recording:
    return record(Setup(SMALL, engine, 4, **changed))


def operations(found: Recording) -> list[Operation]:
    return [event for event in found.events if isinstance(event, Operation)]


def test_products_of_matrices_are_counted_as_the_shapes_say_and_again_where_they_are_recomputed():
    kept, again = recorded("ddp", micro_batch=4), recorded("ddp", micro_batch=4, recompute=True)
    flops = [sum(operation.flops for operation in operations(one)) for one in (kept, again)]
    weights = {n: p.numel() for n, p in GPT(SMALL).named_parameters() if p.dim() == 2}
    multiplied = sum(size for name, size in weights.items() if "tokens" not in name and "positions" not in name)
    tokens, attention = 4 * SMALL.seq, SMALL.layers * SMALL.seq * SMALL.width  # a product, half of it: it is causal
    assert flops[0] == (6 * multiplied + (2 + 5) * attention) * tokens  # two products forward, five backward
    forward = (2 * sum(size for name, size in weights.items() if "blocks" in name) + 2 * attention) * tokens
    assert 0 < flops[1] - flops[0] <= forward
    assert kept.peak_bytes > again.peak_bytes


def test_the_update_moves_what_a_rank_has():
    """AdamW reads weights, gradients and two moments, and writes all but the gradients."""
    (update,) = [one for one in operations(recorded("zero3")) if one.name == "_fused_adamw_"]
    shard = sum(param.numel() for param in GPT(SMALL).parameters()) / 4
    assert update.nbytes == pytest.approx(28 * shard, rel=0.01)


@pytest.mark.parametrize("engine", ("zero1", "zero2", "zero3"))
def test_the_events_send_and_hold_what_a_dry_run_measures(engine):
    measured = memory.measure_alone(engine, memory.arguments(["--preset", "toy", "4", "--dtype", "bf16"]))
    found = record(Setup(preset("toy"), engine, 4))
    sent = Counter()
    for one in found.collectives():
        sent[one.kind] += sent_bytes(one.kind, one.nbytes, one.ranks)
    assert {kind: round(nbytes) for kind, nbytes in sent.items()} == {
        kind: one["bytes"] for kind, one in measured["sent"].items()
    }
    assert found.peak_bytes == measured["peak_bytes"]


@pytest.mark.parametrize("engine", ("ddp", "zero2", "zero3"))
def test_collectives_are_waited_for_once_and_late(engine):
    found = recorded(engine, bucket_mb=0.05)
    waits = Counter(event.kind for event in found.events if isinstance(event, Wait))
    assert waits == Counter(one.kind for one in found.collectives())
    times = replay(found.events, Cluster(GPUS["h100"], launch=0, issue=0, slowdown=0))
    assert times.exposed < 0.95 * times.communication  # gradients are in flight while backward computes


@pytest.mark.parametrize("engine", ("ddp", "zero3"))  # one sends only in the last micro-batch, one in each
def test_more_micro_batches_are_predicted_as_if_all_were_recorded(engine):
    setup = Setup(SMALL, engine, 4, accumulate=6)
    found, whole = predict(setup, H100), record(setup)
    assert found.times == pytest.approx(replay(whole.events, H100))
    assert found.peak_bytes == whole.peak_bytes
    assert (len(whole.collectives()) == len(recorded(engine).collectives())) == (engine == "ddp")


# The command.


def test_the_command_predicts_the_engines_and_recommends_one(capsys):
    argv = "16 --layers 2 --width 64 --heads 4 --vocab 64 --seq 32 --gated --untied --ffn 96 --engines ddp,zero3"
    results = command.plan(arguments(argv.split()))
    printed = capsys.readouterr().out
    assert "Predicted, not measured" in printed and results["recommendation"] in printed
    assert [row["engine"] for row in results["engines"]] == ["ddp", "zero3"] and results["predicted"]
    expected = GPTConfig(2, 64, 4, vocab=64, seq=32, ffn=96, gated=True, tied=False)
    assert GPTConfig(**results["shape"]) == expected
    for row in results["engines"]:
        assert row["tokens_per_s"] == pytest.approx(32 / row["step_s"])
        assert row["needed_bytes"] == round(needed_bytes(row["peak_bytes"]))  # as ./launch.sh memory says


def made(engine: str, step: float, needed: float, fits: bool = True) -> Prediction:
    return Prediction(Setup(SMALL, engine, 8), round(needed), needed, fits, Times(step, step, 0.0, 0.0))


def test_the_recommendation_follows_from_the_numbers():
    ddp, zero2, zero3 = made("ddp", 1.0, 90e9, fits=False), made("zero2", 1.04, 60e9), made("zero3", 1.15, 30e9)
    assert command.recommendation([ddp, zero2, zero3]) == "ZeRO-2 is the fastest that fits."
    assert "counts as equal: ZeRO-3" in command.recommendation([zero2, made("zero3", 1.05, 1)])
    nothing = command.recommendation([ddp, replace(zero3, fits=False)])
    assert nothing.startswith("Nothing fits. ZeRO-3 needs the least, 30 GB.")


REFUSED = {  # the arguments of ./launch.sh plan: the message
    "0": "must be a whole number, 1 or more, got 0",
    "12": "N must be a multiple of --ranks-per-node 8, or less than it, got 12",
    "--engines fsdp2": "no engine 'fsdp2'",
    "--width 65": "65",
    "--gpu t4": "'t4'",
    "--network other": "'other'",
    "--inter-GBps 0": "--inter-GBps must be more than 0",
    "--json /nowhere/plan.json": "cannot write --json",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_answered_in_one_line(line):
    assert REFUSED[line] in mistake(f"plan {line}")


# The page, and the published rows.


def test_the_commands_and_links_of_the_page_work():
    text = page.PAGE.read_text()
    commands = re.findall(r"^\./launch\.sh plan([^#\n]*)", text, re.MULTILINE)
    assert len(commands) >= 4
    for line in commands:
        arguments(shlex.split(line))
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (Path(page.PAGE).parent / target).exists(), target


@pytest.mark.parametrize("model, engine, gpus", [("1.34B", "ddp", 128), ("MPT 1B", "zero3", 16)])
def test_published_rows_are_predicted_as_the_page_says(model, engine, gpus):
    kept = json.loads(page.PREDICTED.read_text())
    number = max(i for i, row in enumerate(ROWS) if (row.model, row.setup.engine, row.setup.ranks)
                 == (model, engine, gpus))  # fmt: skip
    assert page.compare(ROWS[number]) == pytest.approx(kept[number], rel=1e-3)


def test_an_older_kernel_of_attention_is_slower_in_the_rows_that_ran_it():
    """It takes longer by the published ratio of the two versions. Nothing about it is fitted."""
    best = {row.source: row.cluster.gpu.attention for row in ROWS if row.cluster.gpu.name == "h100"}
    assert best[PLAYBOOK] == GPUS["h100"].attention and 1.3 < best[PLAYBOOK] / best[FOUNDRY] < 2.5
