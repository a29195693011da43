"""Functions that readers may write into the blanks of the notebooks, for test_practice.py."""

import torch
from torch.distributed.fsdp import fully_shard


def held(stage, parameters, ranks):
    return parameters * (16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks)[stage]


def held_as_if_always_zero3(stage, parameters, ranks):
    return parameters * 16 / ranks


def cut(values, ranks):
    size = -(-len(values) // ranks)
    padded = values + [0.0] * (size * ranks - len(values))
    return [padded[rank * size : (rank + 1) * size] for rank in range(ranks)]


def cut_like_cards(values, ranks):
    return [values[rank::ranks] for rank in range(ranks)]


def cut_too_long(values, ranks):
    size = len(values) // ranks + 1
    padded = values + [0.0] * (size * ranks - len(values))
    return [padded[rank * size : (rank + 1) * size] for rank in range(ranks)]


def cut_by_a_fraction(values, ranks):
    return [values[0.5]]


def ring_round(buffers, turn):
    ranks = len(buffers)
    moving = [(rank - 1 - turn) % ranks for rank in range(ranks)]
    values = [buffers[rank][shard] for rank, shard in enumerate(moving)]
    for rank, shard in enumerate(moving):
        buffers[(rank + 1) % ranks][shard] += values[rank]


def all_rounds_at_once(buffers, turn):
    for shard in range(len(buffers) if turn == 0 else 0):
        total = sum(buffer[shard] for buffer in buffers)
        for buffer in buffers:
            buffer[shard] = total


def ring_round_shifted(buffers, turn):
    ring_round(buffers, turn + 1)


def zero1_step(rank, ranks, dist, weights, gradients, momentum):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    dist.all_reduce(gradients)
    shard = gradients[own] / ranks
    momentum.mul_(0.5).add_(shard)
    weights[own] -= momentum / 4
    dist.all_gather_single(weights, weights[own])


def zero1_step_by_reduce_scatter(rank, ranks, dist, weights, gradients, momentum):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    shard = torch.empty_like(momentum)
    dist.reduce_scatter_single(shard, gradients)
    momentum.mul_(0.5).add_(shard / ranks)
    weights[own] -= momentum / 4
    dist.all_gather_single(weights, weights[own])


def zero1_step_divided_first(rank, ranks, dist, weights, gradients, momentum):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    gradients /= ranks
    dist.all_reduce(gradients)
    momentum.mul_(0.5).add_(gradients[own])
    weights[own] -= momentum / 4
    dist.all_gather_single(weights, weights[own])


def zero1_step_of_sums(rank, ranks, dist, weights, gradients, momentum):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    dist.all_reduce(gradients)
    momentum.mul_(0.5).add_(gradients[own])
    weights[own] -= momentum / 4
    dist.all_gather_single(weights, weights[own])


def zero1_step_without_gather(rank, ranks, dist, weights, gradients, momentum):
    own = slice(rank * len(momentum), (rank + 1) * len(momentum))
    dist.all_reduce(gradients)
    momentum.mul_(0.5).add_(gradients[own] / ranks)
    weights[own] -= momentum / 4


def zero1_step_without_rank_2(rank, ranks, dist, weights, gradients, momentum):
    if rank == 2:
        dist.all_gather_single(weights, weights[6:9])
    else:
        zero1_step(rank, ranks, dist, weights, gradients, momentum)


class Reduction:
    def __init__(self, dist, gradients):
        self.flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.shard = torch.empty(len(self.flat) // dist.get_world_size())
        self.work = dist.reduce_scatter_single(self.shard, self.flat, async_op=True)

    def finish(self, ranks):
        self.work.wait()
        self.flat = None
        self.shard /= ranks


class DividesFirst(Reduction):
    def __init__(self, dist, gradients):
        self.flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
        self.shard = torch.empty(len(self.flat) // dist.get_world_size())
        self.work = dist.reduce_scatter_single(self.shard, self.flat, async_op=True)

    def finish(self, ranks):
        self.work.wait()
        del self.flat


class WaitsAtOnce(Reduction):
    def __init__(self, dist, gradients):
        super().__init__(dist, gradients)
        self.work.wait()


class WrongSize(Reduction):
    def __init__(self, dist, gradients):
        self.flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.shard = torch.empty(len(self.flat) // 3)
        self.work = dist.reduce_scatter_single(self.shard, self.flat, async_op=True)


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


def gather_flat(whole, shard, dist):
    whole.untyped_storage().resize_(whole.numel() * 4)
    dist.all_gather_single(whole.view(-1), shard)


def gather_without_memory(whole, shard, dist):
    dist.all_gather_single(whole, shard)


def gather_in_elements(whole, shard, dist):
    whole.untyped_storage().resize_(16)
    dist.all_gather_single(whole, shard)


def gather_by_copy(whole, shard, dist):
    whole.untyped_storage().resize_(64)
    second = torch.empty(4, 4)
    dist.all_gather_single(second, shard)
    whole.copy_(second)


def free(whole):
    whole.untyped_storage().resize_(0)


def free_by_other_data(whole):
    whole.data = torch.empty(4, 4)


def free_by_empty_data(whole):
    whole.data = torch.empty(0)


def free_by_name(whole):
    del whole


def free_by_resizing_the_tensor(whole):
    whole.resize_(0)


def blank_gather(whole, shard, dist):
    raise NotImplementedError("my_gather is blank")


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


def wrap_model_first(model):
    for block in [model, *model.blocks]:
        fully_shard(block)


# (cell, solution, a part of what the check prints)
CORRECT = [
    ("held", held, "all four stages"),
    ("cut", cut, "every length"),
    ("ring", ring_round, "one number sent in each"),
    ("zero1", zero1_step, "to the bit"),
    ("zero1", zero1_step_by_reduce_scatter, "2Ψ"),
    ("zero1", zero1_step_divided_first, "4 ranks, 2 steps"),
    ("reduction", Reduction, "that is ZeRO-2"),
    ("reduction", DividesFirst, "that is ZeRO-2"),
    ("gather", (gather, free), "twice"),
    ("gather", (gather_flat, free), "twice"),
    ("wrap", wrap, "rank 0 of 4 holds"),
]
NOT_YET = [
    ("gather", (gather, blank_free), "my_free is blank"),
    ("gather", (blank_gather, free), "my_gather is blank"),
]
WRONG = [
    ("held", held_as_if_always_zero3, "DDP, 1,000 parameters, 4 ranks"),
    ("cut", cut_like_cards, "a collective needs one length"),
    ("cut", cut_too_long, "elements per shard are enough"),
    ("cut", cut_by_a_fraction, "TypeError"),
    ("ring", all_rounds_at_once, "each rank must receive one number"),
    ("ring", ring_round_shifted, "after round 0 rank 0 has [1, 22], expected [11, 2]"),
    ("zero1", zero1_step_of_sums, "and not averaged"),
    ("zero1", zero1_step_without_gather, "not the others' updated weights"),
    ("zero1", zero1_step_without_rank_2, "while rank"),
    ("reduction", WaitsAtOnce, "waited for at once"),
    ("reduction", WrongSize, "the output has 4 elements, and the result 3"),
    ("reduction", KeepsTheWhole, "still alive after finish"),
    ("reduction", Sums, "that is the sum"),
    ("gather", (gather, free_by_other_data), "keeps the old storage"),
    ("gather", (gather, free_by_empty_data), "keeps the old storage"),
    ("gather", (gather, free_by_name), "to delete a name"),
    ("gather", (gather, free_by_resizing_the_tensor), "`Tensor.resize_` changes the tensor and not its memory"),
    ("gather", (gather_without_memory, free), "its storage has 0 bytes"),
    ("gather", (gather_in_elements, free), "its storage has 16 bytes. Does resize_() get bytes (numel() *"),
    ("gather", (gather_by_copy, free), "at twice the memory"),
    ("wrap", wrap_blocks_only, "wrap the model too"),
    ("wrap", wrap_model_only, "gathered with all the rest"),
    ("wrap", wrap_model_first, "wrap the blocks first"),
]
