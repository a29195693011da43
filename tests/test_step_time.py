"""Where the time of a step goes: by hand, and on real ranks of which one is slow."""

import time

import pytest
import torch
import torch.distributed as dist

import fsdp2_compare as referee
from zerolab.measure import step_time
from zerolab.measure.timeline import Span, Wait
from zerolab.run.model import GPTConfig
from zerolab.run.pool import run_on_ranks

# On the ranks.


DELAY = 0.12  # seconds
ENGINES = ("ddp", "zero1", "zero_redundancy_optimizer", "zero2", "fsdp2_no_reshard", "zero3", "fsdp2", "fsdp1")


def built(name: str):
    """(engine, its batch) of a tiny GPT."""
    model = referee.GPT(GPTConfig(2, 16, 2, vocab=32, seq=8))
    engine = referee.build(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.device("cpu"))
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    return engine, (tokens[:, :-1], tokens[:, 1:], referee.next_token_loss)


def watched(name: str, delay: float) -> dict:
    engine, batch = built(name)
    for _ in range(2):  # in the second one DDP rebuilds its buckets
        engine.training_step(*batch)

    def train():
        if dist.get_rank() == 1:
            time.sleep(delay)
        engine.training_step(*batch)

    return step_time.summary(step_time.watch(train, 3, engine))


def a_slow_rank(delay: float) -> dict[str, dict]:
    return {name: watched(name, delay) for name in ENGINES}


# The tests.


def collective(kind: str, issued: float, moves: float, end: float, end_known: bool = True) -> Span:
    return Span("collectives", kind, issued, end, moves=moves, end_known=end_known)


def test_a_step_by_hand():
    """Until 4 the other rank is late, until 4.75 the bytes move, and until 5 the host has not noticed."""
    reduce = collective("all-reduce", 1, 4, 4.75)
    gather = collective("all-gather", 5.5, 6, 7.5, end_known=False)
    found = step_time.divide(0, 10, [Wait(2, 5, reduce)], [reduce, gather])
    parts = {"own": 7.25, "waiting": 2, "exposed": 0.75, "overlapped": 1.5}
    assert found == {"step": 10, **parts, "told_late": True}


def test_the_same_step_of_the_rank_that_is_late():
    """It is the last to issue, at 4, and waits for no rank."""
    reduce = collective("all-reduce", 4, 4, 4.75)
    found = step_time.divide(0, 10, [Wait(4, 4.75, reduce)], [reduce])
    assert found == {"step": 10, "own": 9.25, "waiting": 0, "exposed": 0.75, "overlapped": 0, "told_late": False}


def test_a_collective_over_two_steps_counts_in_each_for_its_part():
    reduce = collective("reduce-scatter", 1, 2, 6)
    first, second = (step_time.divide(start, start + 4, [Wait(3, 6, reduce)], [reduce]) for start in (0, 4))
    assert (first["own"], first["exposed"], first["overlapped"]) == (3, 1, 1)
    assert (second["own"], second["exposed"], second["overlapped"]) == (2, 2, 0)


def test_two_collectives_at_a_time_count_once():
    """While the rank waits for the first, the second moves too."""
    gather, reduce = collective("all-gather", 0, 0, 5), collective("reduce-scatter", 1, 1, 7)
    found = step_time.divide(0, 8, [Wait(4, 5, gather)], [gather, reduce])
    assert (found["own"], found["exposed"], found["overlapped"]) == (7, 1, 6)


def test_the_last_rank_to_issue_is_looked_for_in_the_collectives_own_group():
    three, pair = (0, 1, 2), (0, 1)
    issued = [  # of each rank: (the ranks of the collective, when this rank issued it)
        [(three, 1.0), (pair, 2.0), ((0,), 3.0), (three, 4.0)],
        [(three, 1.5), (pair, 9.0), (three, 3.5)],
        [(three, 0.5), (three, 8.0)],
    ]
    assert step_time.last_issues(issued, 0) == [1.5, 9.0, 3.0, 8.0]
    assert step_time.last_issues(issued, 1) == [1.5, 9.0, 8.0]
    assert step_time.last_issues(issued, 2) == [1.5, 8.0]


def step(seconds: float, own: float, waiting: float = 0.0) -> dict:
    """A step of `seconds`, as `divide` returns it."""
    nothing = {"exposed": 0.0, "overlapped": 0.0, "told_late": False}
    return nothing | {"step": seconds, "own": own, "waiting": waiting}


def test_who_is_the_slowest_and_where():
    slow = [step(0.3, 0.3), step(0.3, 0.2, waiting=0.1), step(0.5, 0.5)]
    fast = [step(0.3, 0.1, waiting=0.2), step(0.3, 0.25, waiting=0.05), step(0.5, 0.1, waiting=0.4)]
    found = step_time.summary([fast, slow, fast])
    assert [rank["step_ms"] for rank in found["ranks"]] == pytest.approx([1100 / 3] * 3, abs=0.001)
    assert (found["slowest_rank"], found["slowest_in_steps"]) == (1, [1, 3])
    assert found["lead_ms"] == 200 and step_time.stands_out(found)
    even = step_time.summary([fast, fast])
    assert not step_time.stands_out(even)
    alone = step_time.summary([slow, []])  # an engine on one rank waits for no other
    assert alone["slowest_rank"] is None and len(alone["ranks"]) == 1 and not step_time.stands_out(alone)


DELAYS = (DELAY, 5 * DELAY, 20 * DELAY)  # a busy machine delays ranks too: then a longer one


@pytest.mark.long
def test_a_slow_rank_makes_the_others_wait_in_every_engine():
    for delay in DELAYS:
        first, second = run_on_ranks(2, a_slow_rank, delay=delay)
        assert first == second  # both ranks have the whole picture
        missed = {}
        for engine, found in first.items():
            fast, slow = found["ranks"]
            is_found = found["slowest_rank"] == 1 and step_time.stands_out(found)
            if not is_found or not fast["waiting_ms"] > 0.6e3 * delay > slow["waiting_ms"]:
                missed[engine] = found
        if not missed:
            return
    raise AssertionError(missed)
