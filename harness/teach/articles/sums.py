"""What is added up, and not run: an article's own numbers, and bytes for each of a preset's parameters."""

from harness.teach.articles.runs import parameters_of


def gigabytes_of(preset: str, each: float, ranks: int = 1, of: tuple[float, ...] = (1,)) -> list[float]:
    """GB of so many bytes for `each` parameter, cut among ranks; or how many times the GB that they are `of`."""
    size = each * parameters_of(preset) / 1e9 / ranks
    return [size / one for one in of]


def added(terms: list[list[float]]) -> list[float]:
    return [sum(one) for one in terms]


def all_reduce_seconds(sizes: list[float], rate: float) -> list[float]:
    """Of so many GB in a ring of 8 ranks with `rate` GB/s."""
    return [2 * 7 / 8 * size / rate for size in sizes]


def gathered_by_eight(sizes: list[float]) -> list[float]:
    """What one of 8 ranks sends in a reduce-scatter or an all-gather."""
    return [7 / 8 * size for size in sizes]
