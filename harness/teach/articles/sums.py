"""What is added up, and not run: an article's own numbers, and bytes for each of a preset's parameters."""

from harness.teach.articles.runs import parameters_of


def gigabytes(preset: str, each: float, ranks: int = 1, of: float = 1) -> float:
    """GB of so many bytes for `each` parameter, cut among ranks; or how many times the GB that they are `of`."""
    return each * parameters_of(preset) / 1e9 / ranks / of


def added(terms: list[float]) -> float:
    return sum(terms)


def all_reduce_seconds(size: float, rate: float) -> float:
    """Of so many GB in a ring of 8 ranks with `rate` GB/s."""
    return 2 * 7 / 8 * size / rate


def gathered_by_eight(size: float) -> float:
    """What one of 8 ranks sends in a reduce-scatter or an all-gather."""
    return 7 / 8 * size
