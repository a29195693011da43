"""The notebooks' own pictures, in the colours and on the paper of the README's."""

from harness.measure.style import BELOW, COLOURS, INK, PAPER, look, new


def ring_cost(numbers: list[int], all_reduce: list[float], halves: list[float]):
    """What one rank sends, in buffers, against the number of ranks: counted in the ring, and everyone to everyone."""
    figure, axes = new(1, height=3.6)
    simple = [ranks - 1 for ranks in numbers]
    axes.plot(numbers, simple, "o:", color=INK, label="all-reduce, everyone to everyone")
    axes.plot(numbers, all_reduce, "s-", color=INK, label="all-reduce, ring")
    axes.plot(numbers, halves, "^-", color=COLOURS["reduce"], label="reduce-scatter or all-gather, ring")
    for ranks, ring in zip(numbers, all_reduce):
        axes.annotate(f"{ring:.4g}", (ranks, ring), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.loglog(base=2)
    axes.set_xticks(numbers, [str(ranks) for ranks in numbers])
    axes.set_yticks([0.5, 1, 2, 8, 32], ["0.5", "1", "2", "8", "32"])
    axes.grid()
    axes.legend(loc="upper left")
    title = "In a ring an all-reduce never costs two buffers (counted in the lists above)"
    axes.set(xlabel="ranks N", ylabel="sent per rank, in buffers", title=title)
    return figure


def layout(bucket, ranks: int):
    """A bucket (zero1.Bucket): its parameters laid end to end, the padding, and where it is cut."""
    figure, axes = new(1, height=1.9)
    axes.broken_barh([(0, bucket.numel)], (0, 1), facecolor="none", edgecolor=INK, hatch="///", linewidth=0.5)
    for name, start, parameter in zip(bucket.names, bucket.offsets, bucket.params):
        axes.broken_barh([(start, parameter.numel())], (0, 1), **look("parameters"))
        axes.text(start + 0.3, 0.5, name, va="center", fontsize=8, color=PAPER)
    for rank in range(ranks):
        axes.axvline((rank + 1) * bucket.shard_numel, color=INK, linewidth=2.5)
        axes.text((rank + 0.5) * bucket.shard_numel, 1.05, f"shard of rank {rank}", ha="center", fontsize=9)
    xlabel = "element of the flat buffer (float32, 4 bytes each); hatched: padding"
    axes.set(ylim=(0, 1.3), yticks=[], xlim=(0, bucket.numel), xticks=range(0, bucket.numel + 1, 4), xlabel=xlabel)
    return figure


def bucket_sizes(sizes: list[float], peaks: list[float], counts: list[int], held: float, title: str):
    """ZeRO-2's peak without activations, in bytes per parameter, for every size of bucket (MiB)."""
    figure, axes = new(1, height=3.6)
    axes.axhline(held, color=INK, linewidth=0.8, linestyle=":")
    text = "held between backward and update: 4Ψ + 12Ψ/N bytes"
    axes.text(len(sizes) - 1, held, text, ha="right", va="bottom", fontsize=8)
    axes.plot(range(len(sizes)), peaks, "^", color=INK, markersize=8)
    for place, (peak, count) in enumerate(zip(peaks, counts)):
        axes.text(place, peak + 0.04 * max(peaks), f"{count} collectives", ha="center", fontsize=8)
    axes.set_xticks(range(len(sizes)), ["one per\nparameter", *(f"{size:.2g}" for size in sizes[1:-1]), "one\nfor all"])
    axes.margins(x=0.08)
    axes.grid(axis="y")
    ylabel = "peak without activations,\nbytes per parameter"
    axes.set(xlabel="bucket size, MiB", ylabel=ylabel, ylim=(0, max(peaks) * 1.15), title=title)
    return figure


def freed(alive: dict[str, list[float]]):
    """MiB alive after each layer's forward, for each way to free: {way: a number per layer}."""
    figure, axes = new(1, height=3.2)
    colours = INK, COLOURS["waiting"], COLOURS["parameters"]
    for (name, live), marker, colour, width in zip(alive.items(), ("o-", "s--", "D-"), colours, (4, 2, 2)):
        axes.plot(live, marker, color=colour, linewidth=width, label=name)
    axes.grid()
    axes.legend(loc="upper left")
    useless = [name for name, live in alive.items() if name != "keep" and live[-1] > 0.9 * alive["keep"][-1]]
    title = f"{' and '.join(useless).capitalize()} frees nothing" if useless else "Ways to free a gathered weight"
    xlabel = "layers whose forward is over, and whose weight was freed"
    axes.set(xticks=range(len(live)), xlabel=xlabel, ylabel="live MiB (2²⁰ bytes)\nbeyond the shards", title=title)
    return figure


def roofline(tokens: list[int], compute_ms: list[float], gathers: dict[str, float], title: str):
    """When a gather hides: ms that a block computes, against a rank's tokens, and ms of its gather, {label: ms}."""
    figure, axes = new(1, height=4.0)
    axes.plot(tokens, compute_ms, color=COLOURS["backward"], linewidth=2.5, label="the block computes")
    for (label, milliseconds), line in zip(gathers.items(), ("-", "--", "-.", ":")):
        axes.axhline(milliseconds, color=COLOURS["gather"], linewidth=1.6, linestyle=line, label=label)
    figure.legend(**BELOW)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{number:,}" for number in tokens], fontsize=8)
    axes.minorticks_off()
    axes.grid()
    axes.set(xlabel="tokens per rank and step", ylabel="ms, by the formula", title=title)
    return figure
