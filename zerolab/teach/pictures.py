"""The pictures of the notebooks that no page has, in the colours of the pages' figures."""

from zerolab.measure.figures import COLOURS, INK, PAPER, new


def layout(bucket, ranks: int):
    """A bucket (zero1.Bucket): its parameters end to end, the padding, and the shards."""
    figure, axes = new(1, height=1.9)
    axes.broken_barh([(0, bucket.numel)], (0, 1), facecolor="none", edgecolor=INK, hatch="///", linewidth=0.5)
    for name, start, parameter in zip(bucket.names, bucket.offsets, bucket.params):
        axes.broken_barh([(start, parameter.numel())], (0, 1), color=COLOURS["parameters"])
        axes.text(start + 0.3, 0.5, name, va="center", fontsize=8, color=PAPER)
    for rank in range(ranks):
        axes.axvline((rank + 1) * bucket.shard_numel, color=INK, linewidth=2.5)
        axes.text((rank + 0.5) * bucket.shard_numel, 1.05, f"shard of rank {rank}", ha="center", fontsize=9)
    xlabel = "element of the flat buffer (float32, 4 bytes each); hatched: padding"
    axes.set(ylim=(0, 1.3), yticks=[], xlim=(0, bucket.numel), xticks=range(0, bucket.numel + 1, 4), xlabel=xlabel)
    return figure


def roofline(tokens: list[int], compute_ms: list[float], gathers: dict[str, float], title: str):
    """When a gather hides: ms of a block's computation against the tokens of a rank, and ms of its gathers."""
    figure, axes = new(1, height=3.6)
    axes.plot(tokens, compute_ms, "-", color=COLOURS["backward"], linewidth=4, label="the block computes")
    for (label, milliseconds), style in zip(gathers.items(), ("-", "--", "-.", ":")):
        axes.plot(tokens, [milliseconds] * len(tokens), style, color=COLOURS["gather"], linewidth=2, label=label)
    axes.set(xlabel="tokens per rank and step", ylabel="ms, by the formula", title=title)
    axes.loglog()
    axes.set_xticks(tokens, tokens, fontsize=8)
    axes.minorticks_off()
    axes.grid()
    axes.legend(loc="upper left")
    return figure
