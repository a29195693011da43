"""`./launch.sh docs`: puts what was measured, and what the code says of itself, into README.md and docs/.

A page is written by hand except between two marks, which a reader on GitHub does not see:

    <!-- generated: referee -->
    ...
    <!-- end -->

What stands there is written by the function of that name in `BLOCKS`, from results/*.json or from the code.
`./launch.sh docs --check` writes nothing and names what is stale.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from harness.measure import step_report, tables
from harness.measure.dry_run import fits_on
from harness.measure.ratios import ratios
from harness.measure.report import page
from harness.teach import articles, changes
from harness.teach.articles.__main__ import counts, markdown
from harness.teach.museum.exhibits import EXHIBITS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<begin><!-- generated: (?P<name>[\w-]+)(?: (?P<arguments>[\w -]+?))? -->).*?(?P<end><!-- end -->)", re.DOTALL
)

REFEREE = "referee-cpu-2ranks-3.json"
REFEREE_LAUNCHES = [f"referee-cpu-2ranks-{number}.json" for number in range(1, 6)]
REFEREE_BF16 = "referee-cpu-2ranks-bf16.json"
SLOW_RANK = "step-time-slow-rank-cpu-2ranks.json"
MEMORY = "memory-7b-8ranks.json"
HYBRID = "memory-7b-32ranks-4replicas.json"
OFFLOAD = "memory-7b-8ranks-offload.json"
HOST_UPDATE = "host-update-cpu.json"
SWEEPS = "sweeps-cpu-2ranks.json"
PLAN_VALIDATION = "plan-validation.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16 over float32 weights"}
ARTICLE_SAYS = {"ddp": "112", "zero1": "63", "zero2": "38.5", "zero3": "14", "fsdp2": "14"}  # GB for 7e9 parameters


def result(name: str):
    """What results/`name` holds."""
    return json.loads((ROOT / "results" / name).read_text())


def table(columns: list[str], rows: list[list[str]]) -> str:
    return tables.markdown([columns, *rows])


def mega(nbytes: float) -> str:
    """Bytes in MB of 10^6."""
    return f"{nbytes / 1e6:,.1f}"


def giga(nbytes: float) -> str:
    """Bytes in GB of 10^9."""
    return f"{nbytes / 1e9:,.2f}"


# The referee.


def difference(name: str, run: dict) -> str:
    """How far an engine's losses are from DDP's, in words where that is nothing."""
    if name == "ddp":
        return "—"
    return "0, to the bit" if run["difference"] == 0 else f"{run['difference']:.0e}".replace("e-0", "e-")


def conditions(report: dict, file: str) -> str:
    """What a report was measured on, in one sentence."""
    return (
        f"Preset `{report['preset']}`, {report['parameters']:,} parameters, {DTYPES[report['dtype']]}, AdamW, "
        f"{report['world_size']} ranks over {report['backend']},\n{report['hardware']}, "
        f"torch {report['torch']} (`results/{file}`)."
    )


TITLES = {"params MB": "parameters MB", "grads MB": "gradients MB", "optim MB": "optimizer MB", "x ddp": "x DDP"}


def of_referee(report: dict, *titles: str, digits: int = 2) -> str:
    """These columns of the referee's results: as it prints them itself, but for digits; held: with `digits`."""
    columns = step_report.columns(report["runs"], "ddp") | {
        "engine": lambda name, run: f"`{name}`",
        "difference from DDP": difference,
        "held MB": lambda name, run: f"{sum(run['held_bytes'].values()) / 1e6:.{digits}f}",
        "peak MB": lambda name, run: mega(run["peak_bytes"]),
        "step ms": lambda name, run: f"{run['step_ms']:.0f}",
        "tokens/s": lambda name, run: f"{run['tokens_per_s']:,.0f}",
    }
    chosen = {title: columns[title] for title in ("engine", *titles)}
    head, *rows = tables.rows_of(chosen, report["runs"])
    return tables.markdown([[TITLES.get(title, title) for title in head], *rows])


def referee() -> str:
    """The README's table: a row per engine, with everything that fits in eight columns."""
    report = result(REFEREE)
    titles = ("last loss", "difference from DDP", "held MB", "peak MB", "sent MB/step", "step ms", "x ddp")
    return f"{of_referee(report, *titles)}\n\n{conditions(report, REFEREE)}"


def referee_losses() -> str:
    report = result(REFEREE)
    titles = ("first loss", "last loss", "difference from DDP", "step ms", "x ddp", "tokens/s")
    return f"{conditions(report, REFEREE)}\n\n{of_referee(report, *titles)}"


def referee_bytes() -> str:
    return of_referee(result(REFEREE), "params MB", "grads MB", "optim MB", "peak MB", "sent MB/step")


def referee_bf16() -> str:
    report = result(REFEREE_BF16)
    titles = ("last loss", "difference from DDP", "held MB", "peak MB", "sent MB/step")
    return f"{conditions(report, REFEREE_BF16)}\n\n{of_referee(report, *titles, digits=1)}"


def launches() -> str:
    """The ratios of step times over several launches."""
    found = ratios([result(file) for file in REFEREE_LAUNCHES])
    middle = len(REFEREE_LAUNCHES) // 2
    rows = [
        [f"`{name}`", *(f"{value:.2f}" for value in (sorted(values)[middle], min(values), max(values)))]
        for name, values in found.items()
    ]
    return table([f"step time, {len(REFEREE_LAUNCHES)} launches", "median", "lowest", "highest"], rows)


def slow_rank() -> str:
    """One rank is delayed in every step: the ranks' step times, and what tells them apart."""
    report = result(SLOW_RANK)
    rows = []
    for name, run in report["runs"].items():
        if name == "single":  # one process waits for nobody
            continue
        fast, slow = run["step_time"]["ranks"]
        times = [f"{rank[key]:.0f}" for key in ("step_ms", "own_ms", "waiting_ms") for rank in (fast, slow)]
        rows.append([f"`{name}`", *times, f"{run['step_time']['slowest_rank']}"])
    columns = [f"{what}, rank {rank}" for what in ("step ms", "own work ms", "waiting ms") for rank in (0, 1)]
    return f"{conditions(report, SLOW_RANK)}\n\n{table(['engine', *columns, 'slowest rank'], rows)}"


# Memory.


def memory_peaks() -> str:
    rows = []
    for name, row in result(MEMORY)["engines"].items():
        held = sum(row["held_bytes"].values())
        label = f"`{name}`" + (" (stand-in)" if row.get("stand_in") else "")
        gpu = fits_on(row["peak_bytes"])[0]
        rows.append([label, giga(held), ARTICLE_SAYS.get(name, ""), giga(row["peak_bytes"]), f"{gpu} GB"])
    return table(["engine", "held, GB", "article, GB", "peak, GB", "smallest GPU"], rows)


def memory_state() -> str:
    results = result(MEMORY)
    each = 4 * results["parameters"] * (results["ranks"] - 1) / results["ranks"]
    rows = []
    for name, row in results["engines"].items():
        formula = row["state_peak_formula"]
        by_formula = f"`{formula}` = {giga(row['state_peak_formula_bytes'])}" if formula else ""
        rows.append([f"`{name}`", giga(row["state_peak_bytes"]), by_formula, f"{row['sent_bytes'] / each:.2f}"])
    return table(["engine", "peak without them, GB", "by formula, GB", "sent, in Ψ (N-1)/N"], rows)


def hybrid() -> str:
    """What is sent along each dimension of the grid, and held."""
    rows = []
    for name, row in result(HYBRID)["engines"].items():
        sent = row["sent_elements_by_dimension"]
        numbers = [giga(sent[where]) if where in sent else "" for where in ("row", "across replicas", "all ranks")]
        label = f"`{name}`" + (" (stand-in)" if row.get("stand_in") else "")
        rows.append([label, *numbers, giga(sum(row["held_bytes"].values())), giga(row["peak_bytes"])])
    where = ["sent in the row", "sent across replicas", "sent among all ranks"]
    return table(["engine", *where, "held, GB", "peak, GB"], rows)


def offload() -> str:
    """Device and host apart, beside the same run without offload."""
    without, rows = result(MEMORY)["engines"], []
    for name, row in result(OFFLOAD)["engines"].items():
        held, host = sum(row["held_bytes"].values()), row["host"]
        more = host["pinned_bytes"] - host["held_bytes"]["parameters"] - host["held_bytes"]["gradients"]
        numbers = [without[name]["peak_bytes"], row["peak_bytes"], held, host["peak_bytes"], host["peak_bytes"] + more]
        rows.append([f"`{name}`", *map(giga, numbers), f"{fits_on(row['peak_bytes'])[0]} GB"])
    columns = ["peak without, GB", "device, peak, GB", "device, held, GB", "host, GB", "if pinned, GB", "smallest GPU"]
    return table(["engine", *columns], rows)


def host_update() -> str:
    """AdamW's ways on the host."""
    found = result(HOST_UPDATE)
    quicker = found["times_quicker"]
    rows = [[name, f"{value:.2f}", f"{quicker[name]:.1f}"] for name, value in found["nanoseconds"].items()]
    on = f"{found['elements']:,} float32 elements, {found['threads']} thread, {found['hardware']}"
    return f"{table(['AdamW', 'ns per element', 'times as quick as the default'], rows)}\n\n{on}."


# Sweeps.


def sweep(words: str) -> str:
    """One sweep: a row per choice. `words`: its name, without commas."""
    names = {name.replace(",", ""): rows for name, rows in result(SWEEPS)["sweeps"].items()}
    rows = [
        [choice, f"{row['collectives']}", f"{row['step_ms']:.0f}", f"{row['step_ms_lowest']:.0f}"]
        + [f"{row['step_ms_highest']:.0f}", f"{row['ratio']:.2f}", mega(row["peak_bytes"])]
        + [mega(row["short_peak_bytes"])]
        for choice, row in names[words].items()
    ]
    columns = [words, "collectives", "step ms", "lowest", "highest", "x the first", "peak MB", "on 8 tokens"]
    return table(columns, rows)


# The planner.


def plan_validation() -> str:
    """Published and predicted, a row per published measurement."""
    rows = []
    for row in result(PLAN_VALIDATION)["rows"]:
        batch = f"{row['micro_batch']} x {row['accumulate']}"
        batch += f", {row['seq']:,}" * (row["source"].startswith("llm") and row["seq"] != 2048)
        cells = [f"{row['gpus']} {row['gpu']}", f"`{row['engine']}`", batch, f"{row['published_tokens_per_s']:,.0f}"]
        off = f"{row['error']:+.1%}" + " *" * row["fitted"]
        cells += [f"{row['predicted_tokens_per_s']:,.0f}", off]
        memory = ""
        if row["published_peak_bytes"]:
            published, predicted = (row[f"{whose}_peak_bytes"] / 1e9 for whose in ("published", "predicted"))
            memory = f"{published:.1f} / {predicted:.1f} ({row['memory_error']:+.1%})"
        rows.append([row["model"], *cells, memory])
    columns = ["model", "GPUs", "engine", "batch", "published", "predicted", "error", "GB: published / predicted"]
    return table(columns, rows)


def plan_summary() -> str:
    """The errors and what was fitted, in sentences."""
    kept = result(PLAN_VALIDATION)
    found, shares = kept["summary"], kept["efficiency"]
    fitted = ", ".join(f"`{gpu}` {share:.1%}" for gpu, share in shares.items())
    networks = []
    for name, network in kept["networks"].items():
        ring, tree = network["crowding"]
        crowds = f"; each further node makes a byte {ring:.0%} slower in a ring, {tree:.0%} in a tree" if ring else ""
        networks.append(f"`{name}` {network['alpha'] * 1e6:.0f} us per hop{crowds}")
    said = (
        f"Tokens per second of the {found['predicted_rows']} rows that were not fitted, sequences beyond 4,096 apart: "
        f"median error {found['median']:.1%}, largest {found['largest']:.1%}. Of all {found['rows']} such rows: median "
        f"{found['median_of_all']:.1%}, largest {found['largest_of_all']:.1%}.",
        f"Memory of {found['memory_rows']} rows: median error {found['memory_median']:.1%}, largest "
        f"{found['memory_largest']:.1%}, {found['memory_within_8']} within 8%.",
        "Which of two engines is faster, where all else is equal and the published values differ by more than 3%: "
        f"{found['pairs_right']} of {found['pairs']} right.",
        f"What did not fit, and is not predicted to: {found['out_of_memory_right']} of {found['out_of_memory']}.",
        f"Fitted: the share of the peak in products of matrices, {fitted}; the networks, {', '.join(networks)}.",
    )
    return "\n".join(textwrap.fill(f"- {line}", 120, subsequent_indent="  ") for line in said)


def plan_groups() -> str:
    """The errors of tokens per second by source and size."""
    rows = []
    for group in result(PLAN_VALIDATION)["summary"]["groups"]:
        about = [group["source"], group["size"], f"{group['rows']}", f"{group['fitted']}"]
        rows.append([*about, f"{group['median']:.1%}", f"{group['largest']:.1%}"])
    return table(["source", "size", "rows", "of them fitted", "median error", "largest"], rows)


def plan_missed() -> str:
    """The rows that miss by more than is hoped for."""
    return "\n".join(f"- {one}" for one in result(PLAN_VALIDATION)["summary"]["missed"])


# The machines that a report was sent from.


def machines() -> str:
    """A row per results/*/report.json: what it was, how many losses were DDP's there, how many tests passed."""
    rows = []
    for file in sorted((ROOT / "results").glob("*/report.json")):
        report = json.loads(file.read_text())
        runs = [job["results"] for job in page.jobs_with_results(report, "referee")]
        found = [page.equal_to_ddp(run) for run in runs]  # none where that part was left out, or failed
        exact, near, wrong = (sum(len(names[place]) for names in found) for place in range(3))
        equal = f"{exact} to the bit, {near} near" + f", {wrong} NOT" * bool(wrong)
        ways = ", ".join(dict.fromkeys(f"{run['world_size']} {run['backend']}" for run in runs))
        passed, failed, _ = page.tests_in_all(report)
        rest = [f"{report['machine'].get('torch')}", ways, equal, f"{passed}" + f", {failed} failed" * bool(failed)]
        where = f"{file.parent.relative_to(ROOT)}/report.md"
        name = page.hardware(report["machine"])
        # A line of the README has 120 columns at most.
        room = max(12, 120 - 8 - 3 * len(rest) - len(where) - sum(map(len, rest)))
        name = name if len(name) <= room else name[: room - 1] + "…"
        rows.append([f"[{name}]({where})", *rest])
    return table(["machine", "torch", "ranks", "engines with DDP's losses", "tests"], rows) if rows else "None yet."


# The code about itself.


def claims() -> str:
    """How many claims hold, in a few words."""
    return counts(result("articles.json"))


def recorded(claims: list[articles.Claim]) -> list[dict]:
    """The rows of these claims."""
    rows = {(row["article"], row["claim"]): row for row in result("articles.json")}
    return [rows[claim.article, claim.claim] for claim in claims]


def article(name: str) -> str:
    """What the article that is called `name` in harness/teach/articles/claim.py says of ZeRO, memory and traffic."""
    title = getattr(articles.claim, name)
    return markdown(recorded([claim for claim in articles.ZERO if claim.article == title]))


def other_claims() -> str:
    """What the articles say of anything else."""
    return markdown(recorded(articles.OTHERS))


def changed(first: str, second: str) -> str:
    """What `./launch.sh changes first second` prints, as GitHub colours it."""
    return f"```diff\n{changes.report(first, second)}\n```"


def outline(name: str) -> str:
    """The methods of a chapter's class that say what they do, in the order of its file."""
    chapter = changes.read(name)
    rows = [[f"`{method}`", words] for method, words in chapter.words.items() if words]
    return table([f"class `{changes.CHAPTERS[name]}`", "what it does"], rows)


def exhibits() -> str:
    return f"{len(EXHIBITS)}"


def exhibits_of(stage: str) -> str:
    """The museum's numbers for a stage. They must be in one run."""
    numbers = [number for number, exhibit in EXHIBITS.items() if exhibit.stage == stage]
    if numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise ValueError(f"the exhibits of {stage} are not in one run: {numbers}")
    return f"{numbers[0]} to {numbers[-1]}"


BLOCKS: dict[str, Callable[..., str]] = {
    "article": article,
    "changes": changed,
    "claims": claims,
    "exhibits": exhibits,
    "exhibits-of": exhibits_of,
    "host-update": host_update,
    "hybrid": hybrid,
    "launches": launches,
    "machines": machines,
    "memory-peaks": memory_peaks,
    "memory-state": memory_state,
    "offload": offload,
    "other-claims": other_claims,
    "outline": outline,
    "plan-groups": plan_groups,
    "plan-missed": plan_missed,
    "plan-summary": plan_summary,
    "plan-validation": plan_validation,
    "referee": referee,
    "referee-bf16": referee_bf16,
    "referee-bytes": referee_bytes,
    "referee-losses": referee_losses,
    "slow-rank": slow_rank,
    "sweep": sweep,
}


def pages() -> list[Path]:
    """README.md and the pages in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def generate(text: str, where: str = "a page") -> str:
    """`text` with every block written anew. Raises ValueError for a block that nobody can write."""

    def write(block: re.Match) -> str:
        name, arguments = block["name"], block["arguments"]
        if name not in BLOCKS:
            raise ValueError(f"{where}: no block {name!r}; there are: {', '.join(BLOCKS)}")
        # A sweep's name has spaces in it; all other arguments are words.
        given = [] if arguments is None else [arguments] if name == "sweep" else arguments.split()
        made = BLOCKS[name](*given)
        # GitHub wants empty lines around a table; what is one line stays in its sentence.
        return block["begin"] + (f"\n\n{made.strip()}\n\n" if "\n" in made else made) + block["end"]

    if text.count("<!-- generated: ") != len(BLOCK.findall(text)):
        raise ValueError(f"{where}: a generated block has no <!-- end -->")
    return BLOCK.sub(write, text)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if --check finds a stale page, 2 for what cannot be written."""
    parser = argparse.ArgumentParser(prog="docs", description="Writes the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing, and say which pages are stale")
    options = parser.parse_args(argv)
    stale = 0
    try:
        for page in pages():
            name, old = page.relative_to(ROOT), page.read_text()
            new = generate(old, str(name))
            if new == old:
                continue
            stale += 1
            if options.check:
                print(f"stale: {name}; ./launch.sh docs writes it anew")
            else:
                page.write_text(new)
                print(f"written: {name}")
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not stale:
        print(f"up to date: {len(pages())} pages")
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
