"""The cells to write in the notebooks: a check distinguishes a blank, a correct solution and typical mistakes."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from zerolab.teach import by_hand, practice
from zerolab.teach.threads import Alone, on_threads


def held(stage, parameters, ranks):
    return parameters * (16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks)[stage]


def held_as_if_always_zero3(stage, parameters, ranks):
    return parameters * 16 / ranks


def cut_like_cards(values, ranks):
    return [values[rank::ranks] for rank in range(ranks)]


def all_rounds_at_once(buffers, turn):
    for shard in range(len(buffers) if turn == 0 else 0):
        total = sum(buffer[shard] for buffer in buffers)
        for buffer in buffers:
            buffer[shard] = total


def zero1_step(rank, ranks, dist, weights, gradients, momentum):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    dist.all_reduce(gradients)
    momentum.mul_(0.5).add_(gradients[own] / ranks)
    weights[own] -= momentum / 4
    dist.all_gather_single(weights, weights[own])


def zero1_step_by_reduce_scatter(rank, ranks, dist, weights, gradients, momentum):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    shard = torch.empty_like(momentum)
    dist.reduce_scatter_single(shard, gradients)
    momentum.mul_(0.5).add_(shard / ranks)
    weights[own] -= momentum / 4
    dist.all_gather_single(weights, weights[own])


def zero1_step_of_sums(rank, ranks, dist, weights, gradients, momentum):
    zero1_step(rank, ranks, dist, weights, gradients * ranks, momentum)


def zero1_step_without_gather(rank, ranks, dist, weights, gradients, momentum):
    zero1_step(rank, ranks, dist, weights.clone(), gradients, momentum)
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    weights[own] -= momentum / 4


class Reduction:
    def __init__(self, dist, gradients):
        self.flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.shard = torch.empty(len(self.flat) // dist.get_world_size())
        self.work = dist.reduce_scatter_single(self.shard, self.flat, async_op=True)

    def finish(self, ranks):
        self.work.wait()
        self.flat = None
        self.shard /= ranks


class WaitsAtOnce(Reduction):
    def __init__(self, dist, gradients):
        super().__init__(dist, gradients)
        self.work.wait()


class KeepsTheWhole(Reduction):
    def finish(self, ranks):
        self.work.wait()
        self.shard /= ranks


class Sums(Reduction):
    def finish(self, ranks):
        self.work.wait()
        self.flat = None


def gather(whole, shard, dist):
    whole.untyped_storage().resize_(64)
    dist.all_gather_single(whole, shard)


def gather_without_memory(whole, shard, dist):
    dist.all_gather_single(whole, shard)


def free(whole):
    whole.untyped_storage().resize_(0)


def free_by_other_data(whole):
    whole.data = torch.empty(4, 4)


def blank_free(whole):
    raise NotImplementedError("my_free is blank")


def wrap(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def wrap_blocks_only(model):
    for block in model.blocks:
        fully_shard(block)


def wrap_model_only(model):
    fully_shard(model)


@pytest.mark.parametrize(
    "cell, solution, message",
    [
        ("held", held, "correct: all four stages"),
        ("held", held_as_if_always_zero3, "not correct yet: DDP, 1,000 parameters, 4 ranks"),
        ("cut", by_hand.cut, "correct: every length"),
        ("cut", cut_like_cards, "not correct yet: 10 values for 4 ranks: expected [[1.0, 2.0, 3.0], [4.0"),
        ("ring", by_hand.reduce_round, "correct: 2, 4 and 5 ranks"),
        ("ring", all_rounds_at_once, "not correct yet: 2 ranks: after round 0 rank 0 has [11, 22], expected [11, 2]"),
        ("zero1", zero1_step, "to the bit"),
        ("zero1", zero1_step_by_reduce_scatter, "correct: and by a reduce-scatter"),
        ("zero1", zero1_step_of_sums, "summed, and not averaged?"),
        ("zero1", zero1_step_without_gather, "rank 0 has the correct shard, and not the others' updated weights"),
        ("reduction", Reduction, "correct: sent and not waited for"),
        ("reduction", WaitsAtOnce, "not correct yet: the collective was waited for at once"),
        ("reduction", KeepsTheWhole, "still alive after finish"),
        ("reduction", Sums, "that is the sum"),
        ("gather", (gather, free), "correct: freed to 0 bytes and gathered again"),
        ("gather", (gather, blank_free), "not yet: my_free is blank"),
        ("gather", (gather, free_by_other_data), "not correct yet: 64 bytes are still alive"),
        ("gather", (gather_without_memory, free), "not correct yet: RuntimeError: all_gather_single: a tensor of 64"),
        ("wrap", wrap, "rank 0 of 4 holds"),
        ("wrap", wrap_blocks_only, "not correct yet: the units are ['blocks.0', 'blocks.1'], expected ['the model', "),
        ("wrap", wrap_model_only, "not correct yet: the units are ['the model'], expected "),
    ],
)
def test_a_solution_is_judged(cell, solution, message, capsys):
    is_correct = practice.check(cell, solution)
    printed = capsys.readouterr().out
    assert message in printed and printed.startswith("correct: ") is is_correct, printed


def test_the_threads_collectives_are_torchs():
    def one(rank, dist):
        whole, shard, gathered = torch.arange(4.0) * 10**rank, torch.empty(2), torch.empty(4)
        work = dist.reduce_scatter_single(shard, whole, async_op=True)
        before = work.waited
        work.wait()
        dist.all_gather_single(gathered, shard)
        dist.all_reduce(whole)
        return before, shard.tolist(), gathered.tolist(), whole.tolist()

    total = [0.0, 11.0, 22.0, 33.0]
    assert on_threads(2, one) == [(False, total[2 * rank : 2 * rank + 2], total, total) for rank in (0, 1)]


def test_threads_whose_collectives_do_not_fit_together_raise(monkeypatch):
    def one_is_missing(rank, dist):
        if rank != 1:
            dist.all_reduce(torch.ones(2))

    def one_is_different(rank, dist):
        if rank != 1:
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_gather_single(torch.ones(4), torch.ones(2))

    with pytest.raises(
        RuntimeError, match=r"all_reduce with 2 elements while rank \d calls|while rank \d calls all_red"
    ):
        on_threads(3, one_is_different)
    monkeypatch.setattr("zerolab.teach.threads.SECONDS", 0.1)
    with pytest.raises(Alone, match="rank [02] waits in all_reduce, and another rank does not"):
        on_threads(3, one_is_missing)
