"""The pictures of the notebooks that no page has, in the colours of the pages' figures."""

from zerolab.measure.figures import COLOURS, INK, PAPER, new


def curves(x, lines: dict[str, tuple], **more):
    """The axes of a new picture with these lines: {name: (numbers, format, colour)}. `more` goes to `axes.set`."""
    _, axes = new(1, height=3.6)
    for place, (name, (numbers, style, colour)) in enumerate(lines.items()):
        axes.plot(x, numbers, style, color=colour, linewidth=max(4 - place, 1.5), label=name)  # all stay visible
    axes.grid()
    axes.legend(loc="upper left")
    axes.set(**more)
    return axes


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


def bucket_sizes(sizes: list[float], peaks: list[float], counts: list[int], held: float, title: str):
    """ZeRO-2's peak without activations, in bytes per parameter, for every size of bucket (MiB)."""
    lines = {
        "peak": (peaks, "^", INK),
        "held between backward and update: 4Ψ + 12Ψ/N bytes": ([held] * len(sizes), ":", INK),
    }
    ylabel = "peak without activations,\nbytes per parameter"
    ylim = (0, 1.4 * max(peaks))
    axes = curves(range(len(sizes)), lines, xlabel="bucket size, MiB", ylabel=ylabel, ylim=ylim, title=title)
    for place, (peak, count) in enumerate(zip(peaks, counts)):
        axes.text(place, peak + 0.04 * max(peaks), f"{count} collectives", ha="center", fontsize=8)
    axes.set_xticks(range(len(sizes)), ["one per\nparameter", *(f"{size:.2g}" for size in sizes[1:-1]), "one\nfor all"])
    axes.margins(x=0.08)
    return axes.figure


def roofline(tokens: list[int], compute_ms: list[float], gathers: dict[str, float], title: str):
    """When a gather hides: ms of a block's computation against the tokens of a rank, and ms of its gathers."""
    lines = {"the block computes": (compute_ms, "-", COLOURS["backward"])}
    for (label, milliseconds), style in zip(gathers.items(), ("-", "--", "-.", ":")):
        lines[label] = [milliseconds] * len(tokens), style, COLOURS["gather"]
    axes = curves(tokens, lines, xlabel="tokens per rank and step", ylabel="ms, by the formula", title=title)
    axes.loglog()
    axes.set_xticks(tokens, tokens, fontsize=8)
    axes.minorticks_off()
    return axes.figure
