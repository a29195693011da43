"""`./launch.sh docs`: writes the tables and figures of README.md and docs/, from results/ and from the code.

A page is written by hand except between two marks, which a reader on GitHub does not see:

    <!-- generated: referee -->
    ...
    <!-- end -->

`BLOCKS` has the function that writes each block. The command also draws the figures into results/figures/.
`./launch.sh docs --check` writes nothing, and lists stale pages and the results that were measured on older code.
"""

import difflib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

from zerolab.measure import referee_report, tables
from zerolab.measure.gpus import fits_on
from zerolab.measure.interleaved import ratios
from zerolab.measure.report import TITLES as OF_A_MACHINE
from zerolab.run import code
from zerolab.run.command_line import one_line
from zerolab.run.ranks import ROOT
from zerolab.teach import docs_options
from zerolab.teach.articles import report as articles
from zerolab.teach.articles.claim import ARTICLES

BLOCK = re.compile(
    r"(?P<begin><!-- generated: (?P<name>[\w-]+)(?: (?P<arguments>[\w -]+?))? -->).*?(?P<end><!-- end -->)", re.DOTALL
)

MEMORY = "memory-7b-8ranks.json"
CURVES = "curves-cpu-2ranks.json"
SLOW_RANK = "step-time-slow-rank-cpu-2ranks.json"
LAUNCHES = [f"referee-cpu-2ranks-{number}.json" for number in range(1, 6)]
ARTICLE_GB = {"ddp": "112", "zero1": "63", "zero2": "38.5", "zero3": "14", "fsdp2": "14"}  # for 7e9 parameters


def result(name: str):
    """The content of results/`name`."""
    return json.loads((ROOT / "results" / name).read_text())


def table(titles: str, rows: list[list[str]]) -> str:
    """`titles` with " | " between them, and rows of cells."""
    return tables.markdown([titles.split(" | "), *rows])


# The referee.


SUMMARY = ("last loss", "diff to ddp", "held MB", "peak MB", "sent MB")
BYTES = ("params MB", "grads MB", "optim MB", "peak MB", "sent MB")
REFEREE = {  # a report of the referee in results/, and the columns of each table that a page shows
    "readme": (LAUNCHES[0], [SUMMARY]),
    "all": (LAUNCHES[0], [("first loss", "last loss", "diff to ddp"), BYTES]),
    "bf16": ("referee-cpu-2ranks-bf16.json", [SUMMARY]),
    "deepspeed": ("referee-deepspeed-cpu.json", [("diff to ddp", *BYTES, "step ms")]),
}
TITLES = {  # in a page, where they differ from the command's
    "params MB": "parameters MB",
    "grads MB": "gradients MB",
    "optim MB": "optimizer MB",
    "sent MB": "sent MB/step",
    "diff to ddp": "difference from DDP",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16 over float32 weights"}


def conditions(report: dict, file: str) -> str:
    """How a report was measured."""
    return (
        f"Preset `{report['preset']}`, {report['parameters']:,} parameters, {DTYPES[report['dtype']]}, AdamW, "
        f"{report['world_size']} ranks over {report['backend']},\n{report['hardware']}, "
        f"torch {report['torch']} (`results/{file}`)."
    )


def referee(which: str, *names: str) -> str:
    """Rows of the referee's table: of the engines `names`, or of all."""
    file, tables_shown = REFEREE[which]
    report, lines = result(file), []
    runs = report["runs"]
    for name in names or runs:
        run = runs[name]
        held = sum(run["held_bytes"].values()) / 1e6
        printed = referee_report.cells_of_run(f"`{name}`", run, runs["ddp"], "ddp")
        lines.append({**printed, "held MB": f"{held:.2f}"})
    made = []
    for columns in tables_shown:
        rows = [[line[column] for column in ("engine", *columns)] for line in lines]
        made.append(tables.markdown([["engine", *(TITLES.get(column, column) for column in columns)], *rows]))
    return "\n\n".join([*made, conditions(report, file)])


def step_times() -> str:
    """Step times of all engines, over several launches."""
    reports, rows = [result(file) for file in LAUNCHES], []
    for name in reports[0]["runs"]:
        times = [report["runs"][name]["step_ms"] for report in reports]
        over_ddp = [time / report["runs"]["ddp"]["step_ms"] for time, report in zip(times, reports)]
        tokens = [report["runs"][name]["tokens_per_s"] for report in reports]
        milliseconds = [f"{choose(times):.0f}" for choose in (median, min, max)]
        rows.append([f"`{name}`", *milliseconds, f"{median(over_ddp):.2f}", f"{median(tokens):,.0f}"])
    made = table("engine | step ms, median | lowest | highest | x DDP, median | tokens/s, median", rows)
    return f"{made}\n\n{conditions(reports[0], LAUNCHES[0].replace('1.json', '[1-5].json'))}"


def launches() -> str:
    """The ratios of step times over several launches."""
    rows = []
    for name, values in ratios([result(file) for file in LAUNCHES]).items():
        rows.append([f"`{name}`", *(f"{ratio(values):.2f}" for ratio in (median, min, max))])
    return table(f"step time, {len(LAUNCHES)} launches | median | lowest | highest", rows)


def curves() -> str:
    """The training runs of docs/train.md."""
    report = result(CURVES)
    reference = report["runs"]["DDP"]["losses"]
    rows = []
    for name, run in report["runs"].items():
        apart = max(abs(loss - other) for loss, other in zip(run["losses"], reference))
        evaluation = list(run["evaluation"].values())[-1]
        rows.append([name, f"{run['losses'][-1]:.4f}", f"{evaluation:.4f}", f"{apart:.1e}" if apart else "0"])
    made = table("run | last training loss | evaluation loss | largest difference from DDP in a step", rows)
    where = f"{report['hardware']}, torch {report['torch']} (`results/{CURVES}`)."
    return f"{made}\n\nPreset `{report['preset']}`, {report['steps']} steps, {report['ranks']} ranks, {where}"


def written(name: str) -> str:
    """What the model of this run writes, and the text before it."""
    given, continued = result(CURVES)["runs"][name]["text"]
    return f"```\n{given} {continued}\n```"


def slow_rank() -> str:
    """The parts of each rank's step, for every engine, while one of the ranks is slow."""
    report, rows = result(SLOW_RANK), []
    for name, run in report["runs"].items():
        ranks = run["step_time"]["ranks"]
        if len(ranks) == 1:
            continue  # `single` has one process, which waits for no other
        parts = [f"{rank[part]:.0f}" for part in ("step_ms", "own_ms", "waiting_ms") for rank in ranks]
        rows.append([f"`{name}`", *parts, f"{run['step_time']['slowest_rank']}"])
    columns = [f"{part} ms, rank {rank}" for part in ("step", "own work", "waiting") for rank in range(2)]
    return f"{table(' | '.join(['engine', *columns, 'slowest rank']), rows)}\n\n{conditions(report, SLOW_RANK)}"


# Memory, in GB of 10^9 bytes.


def memory_peaks() -> str:
    """Each engine's held bytes and peak in a dry run, and the smallest GPU that has room for it."""
    rows = []
    for name, row in result(MEMORY)["engines"].items():
        label = f"`{name}` (stand-in)" if row.get("stand_in") else f"`{name}`"
        held, peak = sum(row["held_bytes"].values()), row["peak_bytes"]
        sizes = [f"{held / 1e9:,.2f}", ARTICLE_GB.get(name, ""), f"{peak / 1e9:,.2f}"]
        rows.append([label, *sizes, f"{fits_on(peak)[0]} GB"])
    return table("engine | held, GB | article, GB | peak, GB | smallest GPU", rows)


def memory_state() -> str:
    report, rows = result(MEMORY), []
    each = 4 * report["parameters"] * (report["ranks"] - 1) / report["ranks"]
    for name, row in report["engines"].items():
        formula = row["state_peak_formula"]
        if formula:
            formula = f"`{formula}` = {row['state_peak_formula_bytes'] / 1e9:,.2f}"
        peak = f"{row['state_peak_bytes'] / 1e9:,.2f}"
        rows.append([f"`{name}`", peak, formula or "", f"{row['sent_bytes'] / each:.2f}"])
    return table("engine | largest state, GB | by formula, GB | sent, in Ψ (N-1)/N", rows)


# Sweeps.


def sweep(*words: str) -> str:
    """One sweep: a row per choice. `words` are the words of its name, without commas."""
    title = " ".join(words)
    names = {name.replace(",", ""): rows for name, rows in result("sweeps-cpu-2ranks.json")["sweeps"].items()}
    rows = []
    for choice, row in names[title].items():
        times = [f"{row[time]:.0f}" for time in ("step_ms", "step_ms_lowest", "step_ms_highest")]
        peaks = [f"{row[peak] / 1e6:,.1f}" for peak in ("peak_bytes", "short_peak_bytes")]
        rows.append([choice, f"{row['collectives']}", *times, f"{row['ratio']:.2f}", *peaks])
    return table(f"{title} | collectives | step ms | lowest | highest | x the first | peak MB | on 8 tokens", rows)


# The machines whose reports are in results/.


def machines() -> str:
    """The first row of each results/*/report.md."""
    rows = [OF_A_MACHINE]
    for file in sorted((ROOT / "results").glob("*/report.md")):
        name, *rest = file.read_text().splitlines()[4].strip("| ").split(" | ")
        rows.append([f"[{name}](../{file.relative_to(ROOT)})", *rest])
    return tables.markdown(rows)


# The code about itself.


def claims() -> str:
    """How many claims of the articles hold."""
    return articles.count(result("articles.json")["claims"])


def claims_that_do_not_hold() -> str:
    return articles.table_of_not_holding(result("articles.json")["claims"])


def article(key: str) -> str:
    """The claims of an article, by its name in zerolab/teach/articles/claim.py."""
    return articles.table_of_article(ARTICLES[key], result("articles.json")["claims"])


def ddp_to_zero() -> str:
    """The lines in which zero.py in docs/migrating/ differs from ddp.py, without the scripts' docstrings."""
    texts = [(ROOT / "docs" / "migrating" / name).read_text() for name in ("ddp.py", "zero.py")]
    before, after = (text.split('"""', 2)[2].strip().splitlines() for text in texts)
    _, _, *shown = difflib.unified_diff(before, after, n=1, lineterm="")  # without the names of the files
    shown = ["..." if line.startswith("@@") else line for line in shown]  # the numbers of lines would be wrong
    return "\n".join(["```diff", *shown, "```"])


CONFORMANCE = "conform-cpu.json"
OUTCOMES = ("correct", "refused", "wrong", "crash", "hang", "not applicable")  # of a test: tests/conformance/report.py


def conformance() -> str:
    """How many tests have which outcome, for every engine that was tested."""
    report, rows = result(CONFORMANCE), []
    for name, found in report["engines"].items():
        count = Counter(one["outcome"] for one in found.values())
        rows.append([f"`{name}`", *(str(count[outcome]) for outcome in OUTCOMES)])
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{tables.markdown([['engine', *OUTCOMES], *rows])}\n\n{versions} (`results/{CONFORMANCE}`)."


def conformance_differs() -> str:
    """The tests in which some engine is wrong, crashes or hangs, and which engines do."""
    engines, rows = result(CONFORMANCE)["engines"], []
    names = dict.fromkeys(name for found in engines.values() for name in found)
    for name in names:
        ends = {engine: found[name]["outcome"] for engine, found in engines.items() if name in found}
        bad = [f"`{engine}` {end}" for engine, end in ends.items() if end in ("wrong", "crash", "hang")]
        correct = ", ".join(f"`{engine}`" for engine, end in ends.items() if end == "correct")
        if bad:
            rows.append([f"`{name}`", ", ".join(bad), correct or "none"])
    return table("test | not correct | correct", rows)


Blocks = dict[str, Callable[..., str]]


BLOCKS: Blocks = {  # the name between the marks, and the function that writes the block
    "referee": referee,
    "step-times": step_times,
    "launches": launches,
    "curves": curves,
    "written": written,
    "slow-rank": slow_rank,
    "sweep": sweep,
    "machines": machines,
    "memory-peaks": memory_peaks,
    "memory-state": memory_state,
    "article": article,
    "claims": claims,
    "claims-that-do-not-hold": claims_that_do_not_hold,
    "ddp-to-zero": ddp_to_zero,
    "conformance": conformance,
    "conformance-differs": conformance_differs,
}


def pages() -> list[Path]:
    """README.md and the pages in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def generate(text: str, where: str = "a page", blocks: Blocks = BLOCKS) -> str:
    """`text` with every block regenerated. Raises ValueError for a block that is not in `blocks`."""

    def write(block: re.Match) -> str:
        name = block["name"]
        if name not in blocks:
            raise ValueError(f"{where}: no block {name!r}; there are: {', '.join(blocks)}")
        made = blocks[name](*(block["arguments"] or "").split())
        # GitHub requires empty lines around a table. A block of one line stays in its sentence.
        return block["begin"] + (f"\n\n{made.strip()}\n\n" if "\n" in made else made) + block["end"]

    if text.count("<!-- generated: ") != len(BLOCK.findall(text)):
        raise ValueError(f"{where}: a generated block has no <!-- end -->")
    return BLOCK.sub(write, text)


def update(pages: list[Path], blocks: Blocks, command: str, check: bool = False) -> int:
    """Write the stale blocks of these pages, or with `check` only list the pages. Returns how many are stale then."""
    stale = 0
    for path in pages:
        name, old = path.relative_to(ROOT), path.read_text()
        new = generate(old, str(name), blocks)
        if new == old:
            continue
        stale += 1
        if check:
            print(f"stale: {name}; run {command}")
        else:
            path.write_text(new)
            print(f"written: {path}")
    if not stale:
        print(f"pages that are up to date: {len(pages)}")
    return stale if check else 0


def older_results() -> list[str]:
    """A line for each file of results/ that was measured on other code than this: engines, chapters or model.

    It is for information, because a change need not change a measurement.
    """
    now, lines = code.measured_hash(), []
    for path in sorted((ROOT / "results").rglob("*.json")):
        measured = json.loads(path.read_text())
        measured = measured.get("otherData", measured) if isinstance(measured, dict) else {}  # in a Chrome trace
        if measured.get("code") != now:
            name, commit = path.relative_to(ROOT), measured.get("commit") or "an unknown commit"
            lines.append(f"measured on older code, {commit}: {name}; its command: {measured.get('command')}")
    return lines


@one_line(ValueError, OSError, KeyError)
def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if --check finds a stale page, or 2 after an error."""
    options = docs_options.arguments(argv)
    stale = update(pages(), BLOCKS, "./launch.sh docs", options.check)
    if options.check:
        print("\n".join(older_results() or ["all results are of this code"]))
        return int(stale > 0)
    from zerolab.measure import figures  # only here, because it imports matplotlib

    for name in figures.FIGURES:
        print(f"written: {figures.draw(name)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
