"""Shards and collectives by hand, on lists in one process: the solutions of notebooks 1 and 2."""


def cut(values: list[float], ranks: int) -> list[list[float]]:
    """Equal shards of `values`, one for each rank. The last one is padded with zeros."""
    size = -(-len(values) // ranks)  # rounded up
    padded = values + [0.0] * (size * ranks - len(values))
    return [padded[rank * size : (rank + 1) * size] for rank in range(ranks)]


def reduce_round(buffers: list[list], turn: int) -> None:
    """One round of the ring's reduce-scatter, in place: every rank sends one number, and the next rank adds it."""
    ranks = len(buffers)
    # The sum of shard s starts on rank s + 1, goes once around and ends on its owner, rank s.
    moving = [(rank - 1 - turn) % ranks for rank in range(ranks)]
    values = [buffers[rank][shard] for rank, shard in enumerate(moving)]  # all send at the same time
    for rank, shard in enumerate(moving):
        buffers[(rank + 1) % ranks][shard] += values[rank]


def gather_round(buffers: list[list], turn: int) -> None:
    """One round of the ring's all-gather, in place: every rank passes on what it received in the last round."""
    ranks = len(buffers)
    for rank in range(ranks):
        shard = (rank - turn) % ranks  # at first its own
        buffers[(rank + 1) % ranks][shard] = buffers[rank][shard]


def ring(buffers: list[list], one_round, after_round=None) -> int:
    """All rounds, in place. Calls `after_round(turn, buffers)`. Returns how many numbers each rank has sent."""
    rounds = len(buffers) - 1
    for turn in range(rounds):
        one_round(buffers, turn)
        if after_round is not None:
            after_round(turn, buffers)
    return rounds
