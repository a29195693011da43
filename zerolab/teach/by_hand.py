"""Shards and collectives by hand, on lists in one process: what notebooks 1 and 2 ask for, and a claim counts with."""


def cut(values: list[float], ranks: int) -> list[list[float]]:
    """Equal shards of `values`, one for each rank; what is missing at the end is filled up with zeros, the padding."""
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
    """One round of the ring's all-gather, in place: every rank passes on what came in the round before."""
    ranks = len(buffers)
    for rank in range(ranks):
        shard = (rank - turn) % ranks  # at first its own
        buffers[(rank + 1) % ranks][shard] = buffers[rank][shard]


def ring(buffers: list[list], one_round, tell=lambda turn, buffers: None) -> int:
    """All rounds, in place. `tell` is called after each. Returns how many numbers each rank has sent."""
    rounds = len(buffers) - 1
    for turn in range(rounds):
        one_round(buffers, turn)
        tell(turn, buffers)
    return rounds
