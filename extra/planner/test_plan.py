"""The planner: the replay against closed forms, the events against the engines, and the printed sentences."""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import test_articles
import test_docs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typed_commands import mistake, typed

from extra.planner import __main__ as command
from extra.planner import (
    claims,
    page,
    parser,
    pictures,
    plan_options,
    recorder,
    repeat,
    sweep,
    validate,
    words,
)
from extra.planner import predict as predict_module
from extra.planner.allocator import reserved_bytes
from extra.planner.events import Await, Collective, Mark, Memory, Operation, Recording, Wait
from extra.planner.hardware import FLASH, GPUS, NETWORKS, TOKENS, Cluster, Network, flash
from extra.planner.one_rank import ENGINES, Setup, grid
from extra.planner.predict import Prediction, predict
from extra.planner.published import FOUNDRY, PLAYBOOK, ROWS
from extra.planner.replay import Times, replay
from zerolab.measure import gpus, memory
from zerolab.measure.dry_run import sent_by_kind
from zerolab.measure.fake_ranks import build_alone, fake_ranks
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.traffic import sent_bytes
from zerolab.measure.watched_step import Seen, watched_step
from zerolab.run.model import GPT, GPTConfig, next_token_loss, preset
from zerolab.teach.articles.claim import Claim

ROOT = Path(__file__).resolve().parents[2]
SMALL = GPTConfig(3, 64, 4, vocab=128, seq=32, kv_heads=2, ffn=96, gated=True, tied=False, bias=False)


# The replay.


@dataclass(frozen=True)
class Plain:
    """An operation takes its FLOPs in seconds, a collective its bytes."""

    launch: float = 0.0
    issue: float = 0.0
    slowdown: float = 0.0
    seconds = staticmethod(lambda operation: operation.flops)
    collective_seconds = staticmethod(lambda collective: collective.nbytes)


def compute(seconds, stream="compute"):
    return Operation(stream, "mm", seconds, 0, "bf16", "1 forward")


def gather(seconds, ranks=8, stride=1, stream="compute"):
    return Collective(stream, "all-gather", seconds, ranks, stride, "")


def wait(ranks=8, stride=1, stream="compute"):
    return Wait(stream, "all-gather", ranks, stride)


@pytest.mark.parametrize(
    "events, step, exposed",
    [
        ([compute(3), compute(4)], 7, 0),
        ([gather(5), wait(), compute(4)], 9, 5),  # nothing to do meanwhile
        ([gather(5), compute(4), wait(), compute(2)], 7, 1),
        ([gather(3), compute(4), wait(), compute(2)], 6, 0),
        ([compute(4), gather(5), wait()], 9, 5),  # it begins where its stream has come to
        ([gather(5), gather(2), compute(1), wait(), wait()], 7, 6),  # one after the other: one group
        ([gather(5), gather(2, 4, 8), compute(1), wait(), wait(4, 8)], 5, 4),  # side by side: two
        ([gather(5), compute(9)], 9, 0),  # nobody waits for it
        ([gather(9), compute(5)], 9, 4),  # and yet the step is not over before
        # Three units, each gathered while the one before it computes: only the first is waited for.
        ([gather(2)] + [gather(2), wait(), compute(5)] * 2 + [wait(), compute(5)], 17, 2),
        # Another stream gathers, and this one waits for its mark, not for what comes there later.
        ([gather(3, stream="s"), wait(stream="s"), Mark("s"), gather(9, stream="s"), Await("compute", 1), compute(2)],
         12, 10),
        ([compute(6), Mark("compute"), Await("s", 1), gather(3, stream="s"), compute(2)], 9, 1),
    ],
)  # fmt: skip
def test_a_step_of_few_events_takes_what_a_closed_form_says(events, step, exposed):
    times = replay(tuple(events), Plain())
    assert (times.step, times.exposed) == (pytest.approx(step), pytest.approx(exposed))
    assert times.compute == pytest.approx(sum(event.flops for event in events if isinstance(event, Operation)))


TEN = [compute(1)] * 10


@pytest.mark.parametrize(
    "events, costs, step",
    [
        ([gather(6), compute(10)], {"slowdown": 0.5}, 6 + (10 - 6 / 1.5)),  # slower during the collective, ...
        ([gather(6), wait(), compute(10)], {"slowdown": 0.5}, 16),  # ... and only there
        (TEN, {"launch": 3}, 10 * 3 + 1),  # a slow host binds, ...
        (TEN, {"launch": 0.5}, 0.5 + 10),
        ([compute(50), *TEN], {"launch": 3}, 3 + 50 + 10),  # ... but for what it issues while the first one runs
        ([gather(1), wait(), compute(1)], {"issue": 7, "launch": 2}, 9 + 1),
    ],
)
def test_the_host_and_a_collective_beside_it_slow_computation_down(events, costs, step):
    assert replay(tuple(events), Plain(**costs)).step == pytest.approx(step)


def test_what_never_comes_is_an_error():
    with pytest.raises((RuntimeError, IndexError, KeyError)):
        replay((wait(), compute(1)), Plain())


# Hardware.


def seconds(collective, gpu="h100", **changed):
    return Cluster(GPUS[gpu], **changed).collective_seconds(collective)


def reduce(nbytes, ranks, stride=1):
    return Collective("compute", "all-reduce", nbytes, ranks, stride, "")


def test_a_collective_takes_hops_times_latency_and_bytes_over_bandwidth():
    for name, (alpha, bus) in {"infiniband": (12e-6, 350e9), "own": (40e-6, 50e9)}.items():
        own = {} if name == "infiniband" else {"alpha": alpha, "inter_gbps": bus / 1e9}
        for ranks in (16, 128, 512):
            for nbytes in (0, 10**6, 10**10):
                wanted = (ranks - 1) * alpha + nbytes * (ranks - 1) / ranks / bus
                assert seconds(gather(nbytes, ranks=ranks), **own) == pytest.approx(wanted)
    inside = seconds(gather(0)), seconds(gather(10**10))
    assert inside == pytest.approx((7 * 44e-6 / 14, 7 * 44e-6 / 14 + 7 / 8 * 10**10 / 361e9))
    assert seconds(reduce(0, 8)) == pytest.approx(44e-6) and seconds(gather(10**9, ranks=1)) == 0


def test_an_all_reduce_takes_a_tree_where_it_is_quicker():
    """Latency of a tree grows with the logarithm of the nodes, and its bandwidth is a little lower than a ring's."""
    small = [seconds(reduce(1000, 8 * nodes)) for nodes in (16, 64, 256)]
    assert small[1] - small[0] == pytest.approx(small[2] - small[1], rel=1e-3)  # two doublings each
    assert small[0] < 2 * seconds(gather(1000, ranks=128))
    large, ring = seconds(reduce(10**11, 16)), 2 * seconds(gather(10**11, ranks=16))
    assert large == pytest.approx(ring)


def test_a_network_crowds_or_does_not():
    """On EFA bytes take longer with every node, on InfiniBand only hops do. You can also describe your own network."""
    for network, crowds in (("infiniband", False), ("roce", False), ("efa", True), (Network(0, 350, (0.5, 0.5)), True)):
        byte = [seconds(gather(10**10, ranks=n), network=network) - seconds(gather(0, ranks=n), network=network)
                for n in (64, 256)]  # fmt: skip
        assert (byte[1] > 2 * byte[0]) == crowds
    with pytest.raises(ValueError, match="one of infiniband, roce, efa, got 'ethernet'"):
        Cluster(GPUS["h100"], network="ethernet")


def test_links_and_networks_count_where_they_are_used():
    inside, across = gather(2 * 10**9, ranks=8), gather(2 * 10**9, ranks=128)
    free = {"alpha": 0.0, "alpha_inside": 0.0}
    assert seconds(inside, intra_gbps=900, **free) == pytest.approx(seconds(inside, **free) / 2)
    assert seconds(inside, inter_gbps=50) == seconds(inside, alpha=1.0) == seconds(inside)
    assert seconds(across, inter_gbps=175, **free) == pytest.approx(2 * seconds(across, **free))
    replicas = gather(2 * 10**9, ranks=16, stride=8)  # one rank of each node: eight such groups share the network
    assert seconds(replicas, **free) > 7 * seconds(across, **free)
    assert seconds(gather(2 * 10**9, ranks=4, stride=2)) < seconds(across)  # four of one node
    assert Cluster(GPUS["h100"]).seconds(compute(10**12)) < Cluster(GPUS["a100"]).seconds(compute(10**12))


def test_flash_attention_reaches_the_published_rates():
    """Forward at the paper's points, backward slower, and the last rate also holds for longer sequences."""
    peak, best = 989, GPUS["h100"].attention
    for size, (forward, _, _) in FLASH.items():
        for tokens, rate in zip(TOKENS, forward):
            assert best * flash(size, tokens, False) * peak == pytest.approx(rate, rel=0.01)
            assert flash(size, tokens, True) < flash(size, tokens, False)
    assert flash(64, 2048, False) < flash(96, 2048, False) < flash(128, 2048, False) < flash(128, 4096, False)
    assert flash(128, 10**6, True) == flash(128, 16_384, True)

    def attends(tokens):
        name = "_scaled_dot_product_flash_attention_for_cpu"
        return Cluster(GPUS["h100"]).seconds(compute(10**15)._replace(name=name, attends=(128, tokens)))

    assert attends(512) > 1.5 * attends(8192)


# The allocator's reserved memory.


def held(*sizes, stream="compute") -> tuple:
    return tuple(Memory(stream, size) for size in sizes)


MIB = 2**20


@pytest.mark.parametrize(
    "sizes, reserved",
    [
        ((1, -1), 2 * MIB),  # a small one needs a segment of 2 MiB, ...
        ((512, 512, 512, -512, -512, -512), 2 * MIB),  # ... which others share
        ((2 * MIB, -2 * MIB), 20 * MIB),  # a middle one takes 20
        ((9 * MIB, 9 * MIB, -9 * MIB, -9 * MIB), 20 * MIB),
        ((30 * MIB + 1, -30 * MIB - 1), 32 * MIB),  # a large one its own, rounded up to 2 MiB
        ((30 * MIB, -30 * MIB, 29 * MIB + 1, -29 * MIB - 1), 30 * MIB),  # freed memory is used again, ...
        ((30 * MIB, -30 * MIB, 40 * MIB, -40 * MIB), 70 * MIB),  # ... if it is large enough
        # Split, and whole again when both parts are free.
        ((30 * MIB, -30 * MIB, 12 * MIB, 18 * MIB, -12 * MIB, -18 * MIB, 30 * MIB, -30 * MIB), 30 * MIB),
        ((30 * MIB, 12 * MIB, -30 * MIB, 18 * MIB, 14 * MIB, -12 * MIB, -18 * MIB, -14 * MIB), (30 + 12 + 14) * MIB),
    ],
)
def test_the_allocator_reserves_blocks_as_torchs_does(sizes, reserved):
    assert reserved_bytes(Recording(held(*sizes), 100, 0)) == 100 + reserved


def test_a_streams_memory_serves_no_other_stream():
    one = held(30 * MIB, -30 * MIB)
    assert reserved_bytes(Recording(one + held(30 * MIB, -30 * MIB, stream="gathers"), 0, 0)) == 60 * MIB
    found = recorded("fsdp2")
    assert len({event.stream for event in found.events if isinstance(event, Memory)}) > 1
    assert reserved_bytes(found) > found.peak_bytes()


# The events of the real engines.


@cache
def recorded(engine, **changed) -> Recording:
    return recorder.record(Setup(SMALL, engine, 4, **changed))


def operations(found: Recording) -> list[Operation]:
    return [event for event in found.events if isinstance(event, Operation)]


def test_products_of_matrices_are_counted_as_the_shapes_say_and_again_where_they_are_recomputed():
    """Whole blocks repeat their forward. Selective checkpointing repeats half of the products, and no attention."""
    kept, blocks, selective = (recorded("ddp", recompute=what, micro_batch=4) for what in parser.RECOMPUTED)
    flops = [sum(operation.flops for operation in operations(one)) for one in (kept, blocks, selective)]
    weights = {n: p.numel() for n, p in GPT(SMALL).named_parameters() if p.dim() == 2}
    multiplied = sum(size for name, size in weights.items() if "tokens" not in name and "positions" not in name)
    tokens, attention = 4 * SMALL.seq, SMALL.layers * SMALL.seq * SMALL.width  # a product, half of it: it is causal
    assert flops[0] == (6 * multiplied + (2 + 5) * attention) * tokens  # two products forward, five backward
    forward = (2 * sum(size for name, size in weights.items() if "blocks" in name) + 2 * attention) * tokens
    assert 0 < flops[2] - flops[0] < flops[1] - flops[0] <= forward
    assert kept.peak_bytes() > selective.peak_bytes() > blocks.peak_bytes()


def test_the_update_and_the_copies_move_what_a_rank_has_and_no_more():
    """A DTensor counts with the rank's own part, and what an operation only writes is not read."""

    def moved(found, name):
        return sum(one.nbytes for one in operations(found) if one.name == name)

    for engine in ("zero3", "fsdp2"):  # AdamW reads weights, gradients, two moments, and writes all but the gradients
        shard = recorded(engine).parameters / 4
        assert moved(recorded(engine), "_fused_adamw_") == pytest.approx(28 * shard, rel=0.01)
    found, sent = recorded("fsdp2"), Counter()
    for one in found.collectives():
        sent[one.kind] += one.nbytes
    assert moved(found, "split_with_sizes_copy") == pytest.approx(2 * sent["all-gather"], rel=0.01)
    # bfloat16 gradients into the float32 buffer of the reduce-scatter
    assert moved(found, "chunk_cat") == pytest.approx(1.5 * sent["reduce-scatter"], rel=0.01)


def step_in_rows(ranks: int, row: int) -> Seen:
    """A step of ZeRO-3 in bfloat16 as the dry run measures it, in rows of `row` ranks."""
    config = preset("toy")
    with fake_ranks(ranks):
        mesh = grid(ranks, row)  # made before there are fake tensors, which have no values
        with FakeTensorMode(allow_non_fake_inputs=True), MemoryLedger() as ledger:
            model = GPT(config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
            engine = build_alone("zero3", model, optimizer, torch.device("cpu"), dtype=torch.bfloat16, mesh=mesh)
            tokens = torch.zeros(1, config.seq + 1, dtype=torch.int64)
            engine.training_step(tokens[:, :-1], tokens[:, 1:], next_token_loss)
            with watched_step(engine, ledger) as seen:
                engine.training_step(tokens[:, :-1], tokens[:, 1:], next_token_loss)
    return seen


@pytest.mark.parametrize("engine", ("zero2", "zero3", "fsdp2", "hybrid"))
def test_the_events_send_and_hold_what_a_ledger_measures(engine):
    if engine == "hybrid":
        seen, row = step_in_rows(4, 2), 2
        measured = {"sent": sent_by_kind(seen.collectives), "peak_bytes": seen.peak}
    else:
        words, row = ["--preset", "toy", "4", "--dtype", "bf16"], None
        measured = memory.measure_alone(engine, memory.arguments(words))
    found = recorder.record(Setup(preset("toy"), engine, 4, row=row))
    across = {(one.kind, one.ranks, one.stride) for one in found.collectives() if one.stride > 1}
    assert across == ({("all-reduce", 2, 2)} if engine == "hybrid" else set())
    sent = Counter()
    for one in found.collectives():
        sent[one.kind] += sent_bytes(one.kind, one.nbytes, one.ranks)
    said = {kind: one["bytes"] for kind, one in measured["sent"].items()}
    assert {kind: round(nbytes) for kind, nbytes in sent.items()} == said
    assert found.peak_bytes() == measured["peak_bytes"]
    assert sum(event.nbytes for event in found.events if isinstance(event, Memory)) == 0  # a step ends as it began


def test_prefetch_buckets_and_overlap_shorten_the_step():
    # Links on which a unit's all-gather takes about as long as its computation.
    cluster = Cluster(GPUS["h100"], launch=0, issue=0, kernel=5e-6, alpha_inside=6e-6)
    none, one = recorded("zero3", prefetch=0), recorded("zero3")
    assert replay(one.events, cluster).step < 0.98 * replay(none.events, cluster).step
    assert one.peak_bytes() > none.peak_bytes()
    small, large = recorded("zero2", bucket_mb=0.02), recorded("zero2", bucket_mb=10)
    assert len(small.collectives()) > len(large.collectives()) == 2
    assert replay(small.events, cluster).step != replay(large.events, cluster).step
    ddp, cluster = recorded("ddp", bucket_mb=0.05), Cluster(GPUS["h100"], launch=0, issue=0, slowdown=0)
    for found in (ddp, one, recorded("fsdp2")):  # gradients are in flight while backward computes
        times = replay(found.events, cluster)
        assert times.exposed < 0.95 * times.communication
        assert times.step >= max(times.compute, times.communication)
    twice = recorded("ddp", accumulate=2, bucket_mb=0.05)
    assert twice.collectives() == ddp.collectives()  # it sends only in the last micro-batch


@pytest.mark.parametrize(
    "engine, changed",
    [
        ("ddp", {"bucket_mb": 0.02}),  # buckets that reach from a block into the next, in the same way
        ("zero1_2psi", {"bucket_mb": 1e6}),
        ("zero2", {"bucket_mb": 0.03, "recompute": "blocks"}),
        ("zero3", {"prefetch": 2}),
        ("hybrid", {"row": 2}),
        ("fsdp2", {}),
    ],
)
def test_repeated_blocks_are_those_that_would_be_recorded(engine, changed, monkeypatch):
    setup = Setup(replace(SMALL, layers=8 + (engine == "zero3")), engine, 4, **changed)
    plain, whole, asked = recorder.record, recorder.record(setup), []
    monkeypatch.setattr(recorder, "record", lambda one: (asked.append(one.config.layers), plain(one))[1])
    repeat.recording.cache_clear()
    found = repeat.recording(setup)
    if engine == "zero1_2psi":  # the number of counters of 4 bytes grows unevenly
        assert found.peak_bytes() == pytest.approx(whole.peak_bytes(), abs=100)
        plain = [[e._replace(nbytes=0) if hasattr(e, "nbytes") else e for e in one.events] for one in (found, whole)]
        assert plain[0] == plain[1]
        assert found.collectives() == whole.collectives()
    else:
        assert found == whole
    assert max(asked) < setup.config.layers, "all blocks were recorded, so nothing was repeated"


@pytest.mark.parametrize("engine", ("ddp", "zero3"))  # one sends only in the last micro-batch, one in each
def test_repeated_micro_batches_are_those_that_would_be_recorded(engine):
    setup = Setup(replace(SMALL, layers=1), engine, 4, accumulate=6)
    assert repeat.recording(setup) == recorder.record(setup)


def test_what_does_not_repeat_is_recorded_in_full():
    three, four = (Recording(tuple(compute(n) for n in range(count)), 0, 0) for count in (3, 4))
    with pytest.raises(repeat.NotRepeating):
        repeat.extend(three, four, 2)
    setup = Setup(replace(SMALL, layers=8), "zero2", 4, bucket_mb=0.33)  # buckets end elsewhere in every block
    assert repeat.recording(setup) == recorder.record(setup)


# The printed sentences.


def test_the_command_predicts_every_engine(capsys):
    argv = "--layers 2 --width 64 --heads 4 --vocab 64 --seq 32 --gated --ffn 96 16 --engines ddp,zero3"
    results = command.plan(planned(argv))
    said = capsys.readouterr().out
    assert [row["engine"] for row in results["engines"]] == ["ddp", "zero3"] and results["predicted"]
    assert "Predicted, not measured" in said and "twice the bandwidth of the network" in said
    assert not any(line.startswith("Measured") for line in said.splitlines())
    for row in results["engines"]:
        assert row["tokens_per_s"] == pytest.approx(32 / row["step_s"])
        assert row["step_s"] >= row["compute_s"] > 0
        assert row["exposed"] * row["step_s"] <= sum(row["collectives_s"].values())


def planned(argv: str):
    return plan_options.arguments(argv.split())


def made(engine: str, step: float, needed: float, fits: bool = True) -> Prediction:
    setup = Setup(SMALL, engine, 8)
    return Prediction(
        setup, 1, round(needed), round(needed), needed, fits, Times(step=step, exposed=step / 10), 1 / step, 0.4
    )


def test_the_recommendation_follows_from_the_numbers():
    cluster = Cluster(GPUS["h100"])
    ddp, zero2, zero3 = made("ddp", 1.0, 90e9, False), made("zero2", 1.04, 60e9), made("zero3", 1.1544, 30e9)
    assert words.choose([ddp, zero2, zero3]) is zero2  # the fastest that fits
    same, slower, fastest = made("zero2", 1.01, 1), made("zero2", 1.1, 1), made("zero3", 1.0, 1)
    assert words.choose([same, fastest]) is same and words.choose([slower, fastest]) is fastest  # the same, to 2%
    assert words.choose([ddp, replace(zero3, fits=False)]) is None
    assert "ZeRO-3 needs least, 30 GB of 80" in words.recommendation([ddp, replace(zero3, fits=False)], cluster)


def test_hybrid_on_one_node_is_zero3_and_left_out():
    for ranks in (1, 7, 8):
        one_node = planned(f"{ranks}")
        assert "hybrid" not in one_node.engines and "zero3" in one_node.engines and "hybrid" in one_node.left_out
    for argv in ("16", "8 --ranks-per-node 4", "8 --sweep ranks"):
        assert "hybrid" in planned(argv).engines and planned(argv).left_out is None


def test_memory_and_plan_agree_on_what_fits(monkeypatch):
    cluster = Cluster(replace(GPUS["h100"], memory_gb=24))
    for live, fits in ((20_950_000_000, True), (20_955_000_000, False)):
        monkeypatch.setattr(predict_module, "recording", lambda setup, live=live: Recording((compute(1),), live, 1))
        assert predict(Setup(SMALL, "zero3", 8), cluster).fits == (24 in gpus.fits_on(live)) == fits


def test_break_evens_are_named():
    def at(exposed, step=1.0):
        return replace(made("zero3", step, 1), times=Times(step=step, exposed=exposed * step))

    ranks = sweep.break_even("ranks", [(8, at(0.01)), (16, at(0.02)), (32, at(0.3))])
    assert ranks == "communication is hidden at 8, 16"
    assert "never" in sweep.break_even("micro-batch", [(1, at(0.2)), (2, at(0.1))])
    assert "from 25 on" in sweep.break_even("bucket", [(1, at(0, 2.0)), (25, at(0, 1.0)), (100, at(0, 1.001))])


@pytest.mark.parametrize("ranks, name", [(8, "intra_gbps"), (16, "inter_gbps")])
def test_the_bandwidth_that_is_enough_is_found(ranks, name, monkeypatch):
    def hidden_from_100(setup, cluster):
        step = Times(step=1.0, exposed=0.01 if getattr(cluster, name) >= 100 else 0.2)
        return replace(made("zero3", 1.0, 1), times=step)

    monkeypatch.setattr(sweep, "predict", hidden_from_100)
    assert sweep.enough(planned(f"{ranks} --sweep bandwidth"), "zero3") in (
        "hidden from 100 GB/s on", "hidden from 101 GB/s on")  # fmt: skip
    monkeypatch.setattr(sweep, "predict", lambda setup, cluster: hidden_from_100(setup, Cluster(GPUS["h100"], 8, 1, 1)))
    assert sweep.enough(planned(f"{ranks} --sweep bandwidth"), "zero3").startswith("not hidden even at 3,2")


# Pictures, and the page.


@pytest.mark.parametrize("name", page.PICTURES)
def test_every_picture_is_drawn_from_its_file(name, tmp_path):
    assert page.draw(name, tmp_path).exists()


def test_the_page_is_up_to_date_and_shows_every_block(capsys):
    assert page.main(["--check"]) == 0, capsys.readouterr().out
    assert {block["name"] for block in test_docs.docs.BLOCK.finditer(page.PAGE.read_text())} == {*page.BLOCKS}


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=[claim.name for claim in claims.CLAIMS])
def test_a_claim_about_time_has_its_recorded_verdict_and_numbers(claim):
    test_articles.assert_as_recorded(claim, page.result("plan-articles"), tolerance=0.1)


def test_all_claims_about_time_are_listed_and_recorded():
    assert [one for one in vars(claims).values() if isinstance(one, Claim)] == claims.CLAIMS
    recorded = [(row["name"], row["claim"]) for row in page.result("plan-articles")]
    assert recorded == [(one.name, one.text) for one in claims.CLAIMS]


def test_what_the_page_names_is_there():
    name, text = str(page.PAGE.relative_to(ROOT)), page.PAGE.read_text()
    test_docs.PAGES[name], test_docs.PROSE[name] = text, test_docs.CODE.sub("", text)
    test_docs.test_links_lead_somewhere(name)
    _, said, _ = typed("plan --help")
    options = set(re.findall(r"--[a-zA-Z-]+", said))
    lines = test_docs.commands(name)
    planned = [words for words in lines if words[0] == "plan"]
    assert {words[0] for words in lines} == {"plan", "test"} and len(planned) > 5
    assert {word for words in planned for word in words if word.startswith("--")} <= options


NUMBERS = [name.replace("_", "-") for name in (*plan_options.WHOLE, *plan_options.ABOVE_0) if name != "ranks"]
CHOICES = ("gpu", "network", "dtype", "engines", "checkpoint-activations", "sweep")
REFUSED = {  # the arguments of ./launch.sh plan: the message
    **{f"--{name} 0": f"--{name} must be" for name in NUMBERS},
    **{f"--{name} other": "'other'" for name in CHOICES},
    "8 --engines hybrid": "would be zero3",
    "0": "N must be from 1 to 1,000,000, got 0",
    "12": "12",
    "--layers 2 --width 65 --heads 4 --vocab 8 --seq 8": "65",
    "--layers 2 --width 64": "--heads, --vocab, --seq",
    "--preset 7b --width 64": "--width",
    "--preset 8x": "8x",
    "--inter-GBps nan": "nan",
    "--alpha-us -3": "--alpha-us must be more than 0, got -3",
    "--network efa --alpha-us 20": "leave out --network efa",
    "--efficiency 1.5": "1.5",
    "--prefetch -1": "-1",
    "--validate --scale": "--validate and --scale cannot be combined",
    "--engines ,": "--engines",
    "--gpu t4": "bfloat16",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_answered_in_one_line(line):
    assert REFUSED[line] in mistake(f"plan {line}")


def test_a_sweep_is_drawn_for_every_engine_and_refused_without_effect():
    row = {"at": 8, "step_s": 1.0, "exposed": 0.1}
    results = {"sweep": "ranks", "title": "", "engines": dict.fromkeys(ENGINES, [row, row | {"at": 16}])}
    figure = pictures.sweep(results)
    assert [line.get_label() for line in figure.axes[0].lines] == list(ENGINES)
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == len(ENGINES)
    with pytest.raises(ValueError, match="prefetch is for hybrid, zero3"):
        sweep.swept(planned("--sweep prefetch --engines ddp"))


# Validation.


def test_the_fit_finds_the_efficiency_and_looks_at_one_node_alone(monkeypatch):
    events = (compute(10**13)._replace(nbytes=10**6),) * 3 + (gather(10**9),)
    monkeypatch.setattr(validate, "recording", lambda setup: Recording(events, 0, 0))
    row = next(row for row in ROWS if row.gpu == "a100")
    setup = row.setup
    step = replay(events, replace(row.cluster, efficiency=0.43)).step
    true = replace(row, tokens_per_s=setup.micro_batch * setup.accumulate * setup.config.seq / step)
    elsewhere = replace(true, setup=replace(setup, ranks=64), tokens_per_s=1.0)
    other = replace(true, gpu="h100", tokens_per_s=1.0)
    assert validate.fit([true], "a100") == pytest.approx(0.43, abs=1e-3)
    long = replace(true, setup=replace(setup, config=replace(setup.config, seq=8192)), tokens_per_s=1.0)
    assert validate.fit([true, long], "a100") == validate.fit([true], "a100")
    assert validate.fit([true, elsewhere, other, elsewhere], "a100") == validate.fit([true], "a100")
    assert validate.fit([elsewhere], "a100") is None


def test_a_networks_latency_is_found_in_what_equal_runs_lose_and_no_row_above_128_gpus_counts(monkeypatch):
    """If all rows are 20% slower, the latency is the same. A model that ran once does not change it."""
    monkeypatch.setattr(validate, "recording", lambda setup: Recording((gather(10**8, ranks=setup.ranks), wait(
        setup.ranks), compute(10**13)), 0, 0))  # fmt: skip
    base = next(row for row in ROWS if row.model == "MPT 7B" and row.setup.ranks == 128)

    def ran(ranks, alpha, slower=1.0, **changed):
        row = replace(base, setup=replace(base.setup, ranks=ranks, **changed))
        events = validate.recording(row.setup).events
        tokens = row.setup.micro_batch * row.setup.config.seq
        return replace(row, tokens_per_s=tokens / replay(events, replace(row.cluster, alpha=alpha)).step / slower)

    for alpha in (8e-6, 20e-6):
        rows = [ran(ranks, alpha) for ranks in (8, 32, 128)]
        far, once = ran(512, 1e-3), ran(64, 1e-3, micro_batch=7)
        slow = [ran(ranks, alpha, 1.2) for ranks in (8, 32, 128)]
        for given in (rows, slow, [*rows, far, once]):
            found = validate.fit_latency(given, "infiniband", base.cluster.gpu.efficiency).alpha
            assert found == pytest.approx(alpha, rel=1e-9)
    assert max(row.setup.ranks for name in NETWORKS for row in validate.on_network(ROWS, name)) <= 128


def test_gradients_that_another_framework_keeps_take_two_bytes_each(monkeypatch):
    monkeypatch.setattr(predict_module, "recording", lambda setup: Recording((compute(10**15),), 100, 10**9))
    row = replace(ROWS[0], keeps_low=False)
    plain, keeps = (validate.check(one, 0.6) for one in (row, replace(row, keeps_low=True)))
    assert keeps["predicted_peak_bytes"] - plain["predicted_peak_bytes"] == 2 * 10**9


def test_an_older_kernel_of_attention_is_slower_in_the_rows_that_ran_it():
    """It takes longer by the published ratio of the two versions. Nothing about it is fitted."""
    best = {row.source: row.cluster.gpu.attention for row in ROWS if row.gpu == "h100"}
    assert best[PLAYBOOK] == GPUS["h100"].attention and 1.3 < best[PLAYBOOK] / best[FOUNDRY] < 2.5


def test_the_results_are_those_of_the_table_that_is_in_use():
    """And one row that is not used in a fit is predicted again, from the recording to the error."""
    kept = json.loads((ROOT / "results" / "plan-validation.json").read_text())
    assert [row["published_tokens_per_s"] for row in kept["rows"]] == [row.tokens_per_s for row in ROWS]
    assert not any(row["fitted"] for row in kept["rows"] if row["gpus"] > 128 or row["size"].startswith("sequences"))
    for name, network in kept["networks"].items():
        assert NETWORKS[name] == Network(network["alpha"], network["bus"], tuple(network["crowding"])), name
    for gpu, share in kept["efficiency"].items():
        assert GPUS[gpu].efficiency == pytest.approx(share, abs=0.005), gpu
    found = kept["summary"]
    assert found["unfitted"]["median"] <= 0.03 and found["all"]["largest"] <= 0.1 and found["memory"]["median"] <= 0.03
    assert len(found["missed"]) == 1 == found["memory"]["rows"] - found["memory_within"]  # named in the page
    assert found["pairs_right"] == found["pairs"] and found["out_of_memory_right"] == found["out_of_memory"]
    number = next(i for i, row in enumerate(ROWS) if row.model == "1.34B" and row.setup.ranks == 128
                  and row.setup.engine == "zero1_2psi" and row.setup.accumulate == 1)  # fmt: skip
    row = ROWS[number]
    found = validate.check(row, kept["efficiency"]["h100"])
    for name, value in kept["rows"][number].items():
        assert found[name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), name
    assert found.keys() == kept["rows"][number].keys()
