"""The notebooks' own pictures, in the colours and on the paper of the README's."""

import textwrap

from harness.measure.style import ALARM, LANE_COLOURS, LANE_STYLES, PART_COLOURS, PART_STYLES, look
from harness.teach.notebook import INK, THEME, new


def copies(kinds: dict[str, str], stages: dict[str, tuple], elements: int, ranks: int):
    """Which elements of which list each rank holds: {list: its part}, {stage: the lists that it cuts}."""
    figure, panels = new(1, len(stages), height=4.2, sharey=True)
    shard = elements // ranks
    for axes, (stage, cut) in zip(panels, stages.items()):
        for rank in range(ranks):
            for row, (kind, part) in enumerate(kinds.items()):
                first, length = (shard * rank, shard) if kind in cut else (0, elements)
                place = ((len(kinds) + 1) * rank + row, 0.85)
                axes.broken_barh([(first, length)], place, **look(PART_STYLES[part], THEME))
        held = sum(shard if kind in cut else elements for kind in kinds)
        axes.set_title(f"{stage}: {held} per rank")
        axes.set_xlim(0, elements)
        axes.set_xticks(range(0, elements + 1, shard))
        axes.set_xlabel("element (4 bytes each)")
    rows = [((len(kinds) + 1) * rank + row + 0.4, kind) for rank in range(ranks) for row, kind in enumerate(kinds)]
    labels = [f"rank {number // len(kinds)}: {kind}" if number % len(kinds) == 0 else kind
              for number, (_, kind) in enumerate(rows)]  # fmt: skip
    panels[0].set_yticks([at for at, _ in rows], labels, fontsize=8)
    panels[0].invert_yaxis()
    return figure


def ring_cost(numbers: list[int], all_reduce: list[float], halves: list[float]):
    """What one rank sends, in buffers, against the number of ranks: counted in the ring, and everyone to everyone."""
    figure, axes = new(height=3.6)
    simple = [ranks - 1 for ranks in numbers]
    lines = (
        (simple, "o:", INK, "all-reduce, everyone to everyone", 7),
        (all_reduce, "s-", INK, "all-reduce, ring", 7),
        (halves, "^-", LANE_COLOURS["reduce"], "reduce-scatter or all-gather, ring", -17),
    )
    for ys, mark, colour, label, above in lines:
        axes.plot(numbers, ys, mark, color=colour, linewidth=1.4)
        axes.annotate(label, (numbers[-1], ys[-1]), (-8, above), textcoords="offset points", ha="right")
    for ranks, ring in zip(numbers, all_reduce):
        axes.annotate(f"{ring:.4g}", (ranks, ring), (0, -13), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(numbers, [str(ranks) for ranks in numbers])
    axes.set_yticks([0.5, 1, 2, 8, 32], ["0.5", "1", "2", "8", "32"])
    axes.set_ylim(0.35, 2.2 * simple[-1])
    axes.set_xlabel("ranks N")
    axes.set_ylabel("sent per rank, in buffers")
    axes.grid(linewidth=0.5)
    axes.set_title("In a ring an all-reduce never costs two buffers (counted in the lists above)")
    return figure


def wire(logical: dict[str, float], crossed: dict[str, float] | None, ranks: int):
    """What a collective must send, and what crossed the loopback interface, per rank and in buffers."""
    figure, axes = new(height=2.9)
    kinds = list(logical)
    lanes = {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}
    for position, kind in enumerate(kinds):
        if crossed:
            axes.barh(position, crossed[kind], 0.6, **look(LANE_STYLES[lanes[kind]], THEME))
        axes.vlines(logical[kind], position - 0.4, position + 0.4, color=THEME["paper"], linewidth=4.5)
        axes.vlines(logical[kind], position - 0.4, position + 0.4, color=INK, linewidth=2)
        text = f"{crossed[kind]:.2f} crossed, " if crossed else ""
        far = max(logical[kind], crossed[kind] if crossed else 0)
        axes.annotate(
            f"{text}{logical[kind]:.2f} needed", (far, position), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max([*logical.values(), *(crossed or {}).values()]))
    axes.set_xlabel(f"sent per rank of {ranks}, in buffers (tick: what the ring needs)")
    finding = "no counter here: only what the ring needs"
    if crossed:
        over = [kind for kind in kinds if crossed[kind] > 1.2 * logical[kind]]
        finding = f"gloo sends more than it must in: {', '.join(over)}" if over else "gloo sends what the ring needs"
    axes.set_title(finding[0].upper() + finding[1:])
    return figure


def layout(bucket, ranks: int):
    """A bucket (zero1.Bucket): its parameters laid end to end, the padding, and where it is cut."""
    figure, axes = new(height=1.9)
    axes.broken_barh([(0, bucket.numel)], (0, 1), facecolor="none", edgecolor=INK, hatch="///", linewidth=0.5)
    for name, start, parameter in zip(bucket.names, bucket.offsets, bucket.params):
        axes.broken_barh([(start, parameter.numel())], (0, 1), **look(PART_STYLES["parameters"], THEME))
        axes.text(start + 0.3, 0.5, name, va="center", fontsize=8, color="#ffffff")
    for rank in range(ranks):
        axes.axvline((rank + 1) * bucket.shard_numel, color=INK, linewidth=2.5)
        axes.text((rank + 0.5) * bucket.shard_numel, 1.05, f"shard of rank {rank}", ha="center", fontsize=9)
    axes.set_ylim(0, 1.3)
    axes.set_yticks([])
    axes.set_xlim(0, bucket.numel)
    axes.set_xticks(range(0, bucket.numel + 1, 4))
    axes.set_xlabel("element of the flat buffer (float32, 4 bytes each); hatched: padding")
    return figure


def bucket_sizes(sizes: list[float], peaks: list[float], counts: list[int], held: float, title: str):
    """ZeRO-2's peak without activations, in bytes per parameter, for every size of bucket (MiB)."""
    figure, axes = new(height=3.6)
    axes.axhline(held, color=INK, linewidth=0.8, linestyle=":")
    text = "held between backward and update: 4Ψ + 12Ψ/N bytes"
    axes.text(len(sizes) - 1, held, text, ha="right", va="bottom", fontsize=8)
    axes.plot(range(len(sizes)), peaks, "^", color=INK, markersize=8)
    for place, (peak, count) in enumerate(zip(peaks, counts)):
        axes.annotate(
            f"{count} collectives", (place, peak), (0, 9), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xticks(range(len(sizes)), ["one per\nparameter", *(f"{size:.2g}" for size in sizes[1:-1]), "one\nfor all"])
    axes.set_xlabel("bucket size, MiB")
    axes.set_ylabel("peak without activations,\nbytes per parameter")
    axes.set_ylim(0, max(peaks) * 1.15)
    axes.margins(x=0.08)
    axes.grid(axis="y", linewidth=0.5)
    axes.set_title(title)
    return figure


def freed(alive: dict[str, list[float]]):
    """MiB alive after each layer's forward, for each way to free: {way: a number per layer}."""
    figure, axes = new(height=3.2)
    styles = {"keep": ("o-", INK, 4.0), "swap": ("s--", ALARM, 2.0), "resize": ("D-", PART_COLOURS["parameters"], 2.0)}
    for name, live in alive.items():
        marker, colour, width = styles[name]
        axes.plot(range(len(live)), live, marker, color=colour, linewidth=width, label=name)
    axes.set_xticks(range(len(live)))
    axes.set_xlabel("layers whose forward is over, and whose weight was freed")
    axes.set_ylabel("live MiB (2²⁰ bytes)\nbeyond the shards")
    axes.grid(linewidth=0.5)
    axes.legend(loc="upper left")
    useless = [name for name, live in alive.items() if name != "keep" and live[-1] > 0.9 * alive["keep"][-1]]
    axes.set_title(
        f"{' and '.join(useless).capitalize()} frees nothing" if useless else "Ways to free a gathered weight"
    )
    return figure


def columns(rows: dict[str, dict[str, float]], title: str):
    """Bars side by side: {label with its unit: {engine: number}}."""
    figure, panels = new(1, len(rows), height=2.8, sharey=True)
    for axes, (label, numbers) in zip(panels, rows.items()):
        for place, value in enumerate(numbers.values()):
            axes.barh(place, value, 0.7, color=INK, alpha=0.65)
            text = f" {value:.3g}" if value < 100 else f" {value:,.0f}"
            axes.text(value, place, text, va="center", fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.3)
    panels[0].set_yticks(range(len(numbers)), list(numbers))
    panels[0].invert_yaxis()
    figure.suptitle(title)
    return figure


VERDICTS = {"holds": ("#37925d", ""), "holds when": ("#93822b", "////"), "does not hold": (ALARM, "xxxx")}


def verdicts(claims: list[dict]):
    """How many claims of each article hold, hold under a condition, or do not, from `./launch.sh articles --json`."""
    articles = list(dict.fromkeys(claim["article"] for claim in claims))
    figure, axes = new(height=0.5 * len(articles) + 1.6)
    for place, article in enumerate(articles):
        start = 0
        for kind, kind_style in VERDICTS.items():
            mine = [claim["verdict"] for claim in claims if claim["article"] == article]
            number = sum(verdict.startswith(kind) and (kind != "holds" or verdict == kind) for verdict in mine)
            label = f"{kind} ..." if kind == "holds when" else kind
            axes.barh(place, number, 0.7, left=start, label=label if place == 0 else None, **look(kind_style, THEME))
            if number:
                axes.annotate(str(number), (start + number / 2, place), ha="center", va="center", fontsize=9,
                              bbox={"facecolor": THEME["paper"], "edgecolor": "none", "pad": 1.2})  # fmt: skip
            start += number
    axes.set_yticks(range(len(articles)), [textwrap.fill(article, 42) for article in articles], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("number of claims")
    held = sum(claim["verdict"] == "holds" for claim in claims)
    axes.set_title(f"{held} of {len(claims)} claims hold without a condition")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def roofline(tokens: list[int], compute_ms: list[float], gathers: dict[str, float], title: str):
    """When a gather hides: ms that a block computes, against a rank's tokens, and ms of its gather, {label: ms}."""
    figure, axes = new(height=4.0)
    axes.plot(tokens, compute_ms, color=LANE_COLOURS["backward"], linewidth=2.5)
    axes.annotate("the block computes", (tokens[-2], compute_ms[-2]), (-8, 0), textcoords="offset points", ha="right")
    for number, (label, milliseconds) in enumerate(gathers.items()):
        line = ("-", "--", "-.", ":")[number % 4]
        axes.axhline(milliseconds, color=LANE_COLOURS["gather"], linewidth=1.6, linestyle=line)
        above = number % 2  # neighbours would write over each other
        axes.annotate(label, (tokens[0], milliseconds), (0, 3 if above else -3), textcoords="offset points", fontsize=8,
                      va="bottom" if above else "top")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{number:,}" for number in tokens], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("tokens per rank and step")
    axes.set_ylabel("ms, by the formula")
    axes.grid(linewidth=0.5)
    axes.set_title(title)
    return figure
