"""The steps to write in the notebooks: a blank is told so, a right one passes, a wrong one is told what is wrong."""

import pytest
import torch

from harness.teach import by_hand, practice
from harness.teach.practice import tasks, threads


def held(stage, parameters, ranks):
    return parameters * (16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks)[stage]


def a_round_late(buffers, turn):
    by_hand.reduce_round(buffers, turn + 1)


def all_at_once(buffers, turn):
    for shard in range(len(buffers) if turn == 0 else 0):
        total = sum(buffer[shard] for buffer in buffers)
        for buffer in buffers:
            buffer[shard] = total


def step(rank, ranks, dist, weights, gradients, momentum, mean=True, gather=True, skip=None, scatter=False):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    if scatter:
        shard = torch.empty_like(momentum)
        dist.reduce_scatter_single(shard, gradients)
    else:
        if rank != skip:
            dist.all_reduce(gradients)
        shard = gradients[own]
    if mean:
        shard = shard / ranks
    momentum.mul_(0.5).add_(shard)
    weights[own] -= momentum / 4
    if gather:
        dist.all_gather_single(weights, weights[own])


class Reduction:
    waits, keeps, sums = False, False, False

    def __init__(self, dist, gradients):
        self.flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.shard = torch.empty(len(self.flat) // 4)
        self.work = dist.reduce_scatter_single(self.shard, self.flat, async_op=True)
        if self.waits:
            self.work.wait()

    def finish(self, ranks):
        self.work.wait()
        if not self.keeps:
            self.flat = None
        if not self.sums:
            self.shard /= ranks


def free(whole):
    whole.untyped_storage().resize_(0)


def swap(whole):
    whole.data = torch.empty(4, 4)


def gather(whole, shard, dist, nbytes=64, into=lambda whole: whole):
    whole.untyped_storage().resize_(nbytes)
    dist.all_gather_single(into(whole), shard)


def wrap(model, blocks=True, root=True):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks if blocks else ():
        fully_shard(block)
    if root:
        fully_shard(model)


def gather_twice(whole, shard, dist):
    second = torch.empty(4, 4)
    dist.all_gather_single(second, shard)
    whole.untyped_storage().resize_(64)
    whole.copy_(second)


def gather_reshaped(whole, shard, dist):
    gather(whole, shard, dist, into=lambda whole: whole.view(-1))


def delete(whole):
    del whole


def resize_tensor(whole):
    whole.resize_(0)


def dots(whole):
    """Give back the memory of `whole`."""
    ...


def dots_gather(whole, shard, dist):
    """Get the memory back."""
    ...


def with_(**options):
    return type("Wrong", (Reduction,), options)


def nothing(*_):
    return None


RIGHT = {"held": held, "cut": by_hand.cut, "ring": by_hand.reduce_round, "zero1": step, "reduction": Reduction,
         "gather": (gather, free), "wrap": wrap}  # fmt: skip


class Blank:
    def __init__(self, dist, gradients):
        self.flat, self.work = torch.zeros(12), None


BLANK = {"reduction": Blank, "gather": (dots_gather, dots)}  # of the others: `nothing`
WRONG = [
    ("held", lambda stage, parameters, ranks: 16 * parameters / ranks, "DDP, 1,000 parameters, 4 ranks"),
    ("cut", lambda values, ranks: [values[rank::ranks] for rank in range(ranks)], "a collective needs one length"),
    ("cut", lambda values, ranks: by_hand.cut(values + [0.0] * ranks, ranks), "elements per shard are enough"),
    ("ring", all_at_once, "each rank must receive one number"),
    ("ring", a_round_late, "after round 0 rank 0 has [1, 22], expected [11, 2]"),
    ("zero1", lambda *a: step(*a, mean=False), "and not averaged"),
    ("zero1", lambda *a: step(*a, gather=False), "not the others' updated weights"),
    ("zero1", lambda *a: step(*a, skip=2), "while rank"),
    ("reduction", with_(waits=True), "waited for at once"),
    ("reduction", with_(keeps=True), "still alive after finish"),
    ("reduction", with_(sums=True), "that is the sum"),
    ("gather", (gather, swap), "keeps the old storage"),
    ("gather", (lambda whole, shard, dist: dist.all_gather_single(whole, shard), free), "its storage has 0 bytes"),
    (
        "gather",
        (lambda *a: gather(*a, nbytes=16), free),
        "its storage has 16 bytes. Does resize_() get bytes (numel() *",
    ),
    ("gather", (gather_twice, free), "at twice the memory"),
    ("gather", (gather, resize_tensor), "`Tensor.resize_` changes the tensor and not its memory"),
    ("gather", (gather, delete), "to delete a name"),
    ("gather", (gather, lambda whole: setattr(whole, "data", torch.empty(0))), "keeps the old storage"),
    ("wrap", lambda model: wrap(model, root=False), "wrap the model too"),
    ("wrap", lambda model: wrap(model, blocks=False), "gathered with all the rest"),
    ("wrap", lambda model: (wrap(model, blocks=False), wrap(model, root=False)), "wrap the blocks first"),
    ("cut", lambda values, ranks: values[0.5], "TypeError"),
]


def test_every_task_is_tried_here():
    assert set(RIGHT) == set(tasks.TASKS) == set(practice.WORDS) == {name for name, _, _ in WRONG}


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_blank_is_not_yet_a_solution_is_right_and_hints_come_one_by_one(name, capsys):
    assert practice.check(name, BLANK.get(name, nothing)) is False
    assert capsys.readouterr().out.startswith("not yet: ")
    assert practice.check(name, RIGHT[name]) is True
    right, onward = capsys.readouterr().out.splitlines()
    assert right.startswith("right: ") and onward.startswith("Next: ")
    hints = practice.WORDS[name]["hints"]
    practice._shown.clear()
    for hint in (*hints, hints[0]):
        practice.hint(name)
        assert hint in capsys.readouterr().out


@pytest.mark.parametrize("name, solution, said", WRONG)
def test_a_mistake_is_told(name, solution, said, capsys):
    assert practice.check(name, solution) is False
    out = capsys.readouterr().out
    assert out.startswith("not right yet: ") and said in out, out


def test_other_ways_that_are_right_and_one_blank_of_two(capsys):
    """A blank is known by its body, and not by what it has not done: nor does `del` do anything that can be seen."""
    for name, solution, said in (
        ("zero1", lambda *a: step(*a, scatter=True), "2Ψ"),
        ("gather", (gather_reshaped, free), "right: "),
        ("gather", (gather, dots), "not yet: my_free has freed nothing"),
        ("gather", (dots_gather, free), "not yet: my_gather has called no collective"),
    ):
        assert practice.check(name, solution) is ("not yet" not in said)
        assert said in capsys.readouterr().out


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
    assert threads.on_threads(2, one) == [(False, total[2 * rank : 2 * rank + 2], total, total) for rank in (0, 1)]
    with pytest.raises(RuntimeError, match="rank 0 waits in all_reduce, and rank 1 never calls it"):
        threads.on_threads(3, lambda rank, dist: dist.all_reduce(torch.ones(2)) if rank != 1 else None)
