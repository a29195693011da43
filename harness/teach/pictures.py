"""The notebooks' own pictures, in the colours and on the paper of the README's."""

import textwrap
from collections import Counter

from harness.measure.style import BELOW, COLOURS, INK, OVER_LINES, PAPER, beside, key, look, new, stacked, tick
from harness.teach import quiz


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


def wire(logical: dict[str, float], crossed: dict[str, float] | None, ranks: int):
    """What a collective must send, and what crossed the loopback interface, per rank and in buffers."""
    figure, axes = new(1, height=2.9)
    kinds = list(logical)
    lanes = {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}
    for position, kind in enumerate(kinds):
        if crossed:
            axes.barh(position, crossed[kind], 0.6, **look(lanes[kind]))
        tick(axes, logical[kind], position, 0.4)
        text = f"{crossed[kind]:.2f} crossed, " if crossed else ""
        far = max(logical[kind], crossed[kind] if crossed else 0)
        beside(axes, f"{text}{logical[kind]:.2f} needed", far, position)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    finding = "no counter here: only what the ring needs"
    if crossed:
        over = [kind for kind in kinds if crossed[kind] > 1.2 * logical[kind]]
        finding = f"gloo sends more than it must in: {', '.join(over)}" if over else "gloo sends what the ring needs"
    longest = max([*logical.values(), *(crossed or {}).values()])
    xlabel = f"sent per rank of {ranks}, in buffers (tick: what the ring needs)"
    axes.set(xlim=(0, 1.5 * longest), xlabel=xlabel, title=finding[0].upper() + finding[1:])
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
    styles = {"keep": ("o-", INK, 4.0), "swap": ("s--", COLOURS["waiting"], 2.0)}
    styles["resize"] = ("D-", COLOURS["parameters"], 2.0)
    for name, live in alive.items():
        marker, colour, width = styles[name]
        axes.plot(range(len(live)), live, marker, color=colour, linewidth=width, label=name)
    axes.grid()
    axes.legend(loc="upper left")
    useless = [name for name, live in alive.items() if name != "keep" and live[-1] > 0.9 * alive["keep"][-1]]
    title = f"{' and '.join(useless).capitalize()} frees nothing" if useless else "Ways to free a gathered weight"
    xlabel = "layers whose forward is over, and whose weight was freed"
    axes.set(xticks=range(len(live)), xlabel=xlabel, ylabel="live MiB (2²⁰ bytes)\nbeyond the shards", title=title)
    return figure


def columns(rows: dict[str, dict[str, float]], title: str):
    """Bars side by side: {label with its unit: {engine: number}}."""
    figure, panels = new(1, len(rows), height=2.8, sharey=True)
    for axes, (label, numbers) in zip(panels, rows.items()):
        found = axes.barh(list(numbers), numbers.values(), 0.7, color=INK, alpha=0.65)
        texts = [f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in numbers.values()]
        axes.bar_label(found, texts, padding=3, fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.3)
    panels[0].invert_yaxis()
    figure.suptitle(title)
    return figure


VERDICTS = {"holds": "optimizer", "when": "temporaries", "not": "waiting"}  # in the colours of these


def verdicts(claims: list[dict]):
    """How many claims of each article hold, hold under a condition, or do not, from `./launch.sh articles --json`."""
    articles = list(dict.fromkeys(claim["article"] for claim in claims))
    figure, axes = new(1, height=0.5 * len(articles) + 1.6)
    for place, article in enumerate(articles):
        found = Counter(quiz.kind(claim["verdict"]) for claim in claims if claim["article"] == article)
        stacked(axes, place, {part: found[vote] for vote, part in VERDICTS.items()}, 0.7)
    for (bar,) in axes.containers:
        if bar.get_width():
            axes.text(
                *bar.get_center(), f"{bar.get_width():.0f}", ha="center", va="center", fontsize=9, bbox=OVER_LINES
            )
    axes.set_yticks(range(len(articles)), [textwrap.fill(article, 42) for article in articles], fontsize=8)
    axes.invert_yaxis()
    held = sum(claim["verdict"] == "holds" for claim in claims)
    axes.set(xlabel="number of claims", title=f"{held} of {len(claims)} claims hold without a condition")
    words = ("holds", "holds when ...", "does not hold")
    figure.legend(handles=key(VERDICTS.values(), dict(zip(VERDICTS.values(), words))), **BELOW)
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
