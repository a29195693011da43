"""`./launch.sh docs`: puts what was measured, and what the code says of itself, into README.md and docs/.

A page is written by hand except between two marks, which a reader on GitHub does not see:

    <!-- generated: referee -->
    ...
    <!-- end -->

What stands there is written by the function of that name in `BLOCKS`, from results/*.json or from the code.
`./launch.sh docs --check` writes nothing and names what is stale.
"""

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.measure import step_report, tables
from harness.measure.memory import fits_on
from harness.measure.ratios import ratios
from harness.measure.report import page
from harness.plan import validate
from harness.properties.conform import OUTCOMES
from harness.properties.property import library
from harness.run import journal
from harness.run.ending import Parser, one_line
from harness.teach import articles, changes
from harness.teach.articles.__main__ import counts, markdown
from harness.teach.museum.exhibits import EXHIBITS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<begin><!-- generated: (?P<name>[\w-]+)(?: (?P<arguments>[\w -]+?))? -->).*?(?P<end><!-- end -->)", re.DOTALL
)

REFEREE = "referee-cpu-2ranks-3.json"
REFEREE_LAUNCHES = [f"referee-cpu-2ranks-{number}.json" for number in range(1, 6)]
REFEREE_DEEPSPEED = "referee-deepspeed-cpu.json"
REFEREE_BF16 = "referee-cpu-2ranks-bf16.json"
SLOW_RANK = "step-time-slow-rank-cpu-2ranks.json"
MEMORY = "memory-7b-8ranks.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16 over float32 weights"}
ARTICLE_SAYS = {"ddp": "112", "zero1": "63", "zero2": "38.5", "zero3": "14", "fsdp2": "14"}  # GB for 7e9 parameters


def result(name: str):
    """What results/`name` holds."""
    return json.loads((ROOT / "results" / name).read_text())


def table(titles: str, cells: str, rows: Iterable[dict]) -> str:
    """The titles and a row's cells, both with " | " between them; "{name:.2f}" in a cell is a value of the row."""
    form = cells.split(" | ")
    return tables.markdown([titles.split(" | "), *([cell.format_map(row) for cell in form] for row in rows)])


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
BYTES = "params MB", "grads MB", "optim MB", "peak MB", "sent MB/step"
# {what is shown: (results, columns of a table, of the next, ...)}; the README's has all that fits in eight columns.
SHOWN = {
    "readme": (REFEREE, ("last loss", "difference from DDP", "held MB", "peak MB", "sent MB/step", "step ms", "x ddp")),
    "all": (REFEREE, ("first loss", "last loss", "difference from DDP", "step ms", "x ddp", "tokens/s"), BYTES),
    "bf16": (REFEREE_BF16, ("last loss", "difference from DDP", "held MB", "peak MB", "sent MB/step")),
    "deepspeed": (REFEREE_DEEPSPEED, ("difference from DDP", *BYTES, "step ms")),
}


def referee(which: str, *names: str) -> str:
    """A comparison of these engines, or of all, as the referee prints it itself but for digits."""
    file, *shown = SHOWN[which]
    report, made = result(file), []
    runs = {name: report["runs"][name] for name in names or report["runs"]}
    columns = step_report.columns(report["runs"], "ddp") | {
        "engine": lambda name, run: f"`{name}`",
        "difference from DDP": difference,
        "held MB": lambda name, run: f"{sum(run['held_bytes'].values()) / 1e6:.2f}",
        "peak MB": lambda name, run: f"{run['peak_bytes'] / 1e6:,.1f}",
        "step ms": lambda name, run: f"{run['step_ms']:.0f}" if run["step_ms"] else "-",
        "tokens/s": lambda name, run: f"{run['tokens_per_s']:,.0f}",
    }
    for titles in shown:
        head, *rows = tables.rows_of({title: columns[title] for title in ("engine", *titles)}, runs)
        made.append(tables.markdown([[TITLES.get(title, title) for title in head], *rows]))
    return "\n\n".join([*made, conditions(report, file)])


def launches() -> str:
    """The ratios of step times over several launches."""
    found = ratios([result(file) for file in REFEREE_LAUNCHES])
    rows = [{"name": name, "values": sorted(values)} for name, values in found.items()]
    titles = f"step time, {len(REFEREE_LAUNCHES)} launches | median | lowest | highest"
    return table(titles, "`{name}` | {values[2]:.2f} | {values[0]:.2f} | {values[4]:.2f}", rows)


def slow_rank() -> str:
    """One rank is delayed in every step: the ranks' step times, and what tells them apart."""
    report = result(SLOW_RANK)
    # "single" is one process, which waits for nobody.
    rows = [run["step_time"] | {"engine": name} for name, run in report["runs"].items() if name != "single"]
    titles, cells = "engine", "`{engine}`"
    for title, key in (("step ms", "step_ms"), ("own work ms", "own_ms"), ("waiting ms", "waiting_ms")):
        titles += f" | {title}, rank 0 | {title}, rank 1"
        cells += f" | {{ranks[0][{key}]:.0f}} | {{ranks[1][{key}]:.0f}}"
    made = table(f"{titles} | slowest rank", f"{cells} | {{slowest_rank}}", rows)
    return f"{conditions(report, SLOW_RANK)}\n\n{made}"


# Memory, in GB of 10^9 bytes.


def dry_runs(file: str) -> list[dict]:
    """The engines' rows of a dry run, with what they hold, and the smallest GPU that their peak fits on."""
    rows = []
    for name, row in result(file)["engines"].items():
        label = f"`{name}`" + (" (stand-in)" if row.get("stand_in") else "")
        held, peak = sum(row["held_bytes"].values()) / 1e9, row["peak_bytes"] / 1e9
        gpu = f"{fits_on(row['peak_bytes'])[0]} GB"
        rows.append({**row, "name": name, "engine": label, "held": held, "peak": peak, "gpu": gpu})
    return rows


def memory_peaks() -> str:
    rows = [row | {"article": ARTICLE_SAYS.get(row["name"], "")} for row in dry_runs(MEMORY)]
    titles = "engine | held, GB | article, GB | peak, GB | smallest GPU"
    return table(titles, "{engine} | {held:,.2f} | {article} | {peak:,.2f} | {gpu}", rows)


def memory_state() -> str:
    report, rows = result(MEMORY), dry_runs(MEMORY)
    each = 4 * report["parameters"] * (report["ranks"] - 1) / report["ranks"]
    for row in rows:
        formula = row["state_peak_formula"]
        row["formula"] = f"`{formula}` = {row['state_peak_formula_bytes'] / 1e9:,.2f}" if formula else ""
        row |= {"state_peak": row["state_peak_bytes"] / 1e9, "psi": row["sent_bytes"] / each}
    titles = "engine | peak without them, GB | by formula, GB | sent, in Ψ (N-1)/N"
    return table(titles, "`{name}` | {state_peak:,.2f} | {formula} | {psi:.2f}", rows)


def hybrid() -> str:
    """What is sent along each dimension of the grid, and held."""
    rows = dry_runs("memory-7b-32ranks-4replicas.json")
    for row in rows:
        elements = {"row": 0, "across replicas": 0, "all ranks": 0}
        for one in row["sent"]:
            elements[one["where"]] += one["elements"]
        row["sent"] = {where: f"{number / 1e9:,.2f}" * bool(number) for where, number in elements.items()}
    titles = "engine | sent in the row | sent across replicas | sent among all ranks | held, GB | peak, GB"
    cells = "{engine} | {sent[row]} | {sent[across replicas]} | {sent[all ranks]} | {held:,.2f} | {peak:,.2f}"
    return table(titles, cells, rows)


def offload() -> str:
    """Device and host apart, beside the same run without offload."""
    without, rows = {row["name"]: row["peak"] for row in dry_runs(MEMORY)}, dry_runs("memory-7b-8ranks-offload.json")
    for row in rows:
        host = row["host"]
        more = host["pinned_bytes"] - host["held_bytes"]["parameters"] - host["held_bytes"]["gradients"]
        row |= {"without": without[row["name"]], "host": host["peak_bytes"] / 1e9}
        row["pinned"] = row["host"] + more / 1e9
    titles = "engine | peak without, GB | device, peak, GB | device, held, GB | host, GB | if pinned, GB | smallest GPU"
    cells = "{engine} | {without:,.2f} | {peak:,.2f} | {held:,.2f} | {host:,.2f} | {pinned:,.2f} | {gpu}"
    return table(titles, cells, rows)


# Sweeps.


def sweep(words: str) -> str:
    """One sweep: a row per choice. `words`: its name, without commas."""
    names = {name.replace(",", ""): rows for name, rows in result("sweeps-cpu-2ranks.json")["sweeps"].items()}
    rows = []
    for choice, row in names[words].items():
        rows.append({**row, "choice": choice, "peak": row["peak_bytes"] / 1e6, "short": row["short_peak_bytes"] / 1e6})
    titles = f"{words} | collectives | step ms | lowest | highest | x the first | peak MB | on 8 tokens"
    cells = "{choice} | {collectives} | {step_ms:.0f} | {step_ms_lowest:.0f} | {step_ms_highest:.0f} | {ratio:.2f}"
    return table(titles, cells + " | {peak:,.1f} | {short:,.1f}", rows)


# The planner.


def plan_validation() -> str:
    return tables.markdown(validate.table(result("plan-validation.json")["rows"]))


def plan_groups() -> str:
    return tables.markdown(validate.table_of_groups(result("plan-validation.json")["summary"]["groups"]))


def plan_summary() -> str:
    """The errors and what was fitted, in sentences."""
    said = validate.in_sentences(result("plan-validation.json"))
    return "\n".join(textwrap.fill(f"- {line}", 120, subsequent_indent="  ") for line in said)


def plan_missed() -> str:
    """The rows that miss by more than is hoped for."""
    return "; ".join(result("plan-validation.json")["summary"]["missed"]) or "none"


# The machines that a report was sent from.


def machines() -> str:
    """A row per results/*/report.json: what it was, how many losses were DDP's there, how many tests passed."""
    rows = [["machine", "torch", "ranks", "runs of an engine with DDP's losses", "tests passed"]]
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
        rows.append([f"[{page.hardware(report['machine'])}]({where})", *rest])
    return tables.markdown(rows) if rows[1:] else "None yet."


# A run that came back.

KILLED = ("a rank is killed by `kill -9`", "launcher and rank of one machine are killed: N = 1",
          "the machine comes back: N = 2")  # fmt: skip


def restarts() -> str:
    """How long each restart of a recorded run took, phase by phase."""
    lines = journal.read(ROOT / "results" / "train-zero2-cpu.jsonl")
    found = [line for line in lines if line.get("event") == "restart"]
    rows = [["seconds, preset `tiny`, N = 2", *found[0]["seconds"], "in all", "steps made again"]]
    for what, line in zip(KILLED, found, strict=True):
        seconds = line["seconds"] | {"in all": sum(line["seconds"].values())}
        cells = [f"{seconds[phase]:.1f}" if phase in seconds else "" for phase in rows[0][1:-1]]
        rows.append([what, *cells, str(line["repeated"])])
    return tables.markdown(rows)


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


def changes_between(first: str, second: str) -> str:
    """What `./launch.sh changes first second` prints, as GitHub colours it."""
    return f"```diff\n{changes.report(first, second)}\n```"


def outline(name: str) -> str:
    """The methods of a chapter's class that say what they do, in the order of its file."""
    chapter = changes.read(name)
    rows = [[f"`{method}`", words] for method, words in chapter.words.items() if words]
    return tables.markdown([[f"class `{changes.CHAPTERS[name]}`", "what it does"], *rows])


def exhibits() -> str:
    return f"{len(EXHIBITS)}"


CONFORMANCE = "conform-cpu.json"


def conformance() -> str:
    """How many properties end how, for every engine that was asked."""
    report, rows = result(CONFORMANCE), []
    for name, found in report["engines"].items():
        count = Counter(one["outcome"] for one in found.values())
        rows.append([f"`{name}`", *(str(count[outcome]) for outcome in OUTCOMES)])
    said = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{tables.markdown([['engine', *OUTCOMES], *rows])}\n\n{said} (`results/{CONFORMANCE}`)."


def conformance_differs() -> str:
    """The properties in which some engine is wrong, crashes or hangs: who does so."""
    engines, rows = result(CONFORMANCE)["engines"], []
    for name in library():
        ends = {engine: found[name]["outcome"] for engine, found in engines.items() if name in found}
        bad = [f"`{engine}` {end}" for engine, end in ends.items() if end in ("wrong", "crash", "hang")]
        right = ", ".join(f"`{engine}`" for engine, end in ends.items() if end == "right")
        rows += [[f"`{name}`", ", ".join(bad), right or "nobody"]] * bool(bad)
    return tables.markdown([["property", "who is not right", "who is"], *rows])


def exhibits_of(stage: str) -> str:
    """The museum's numbers for a stage. They must be in one run."""
    numbers = [number for number, exhibit in EXHIBITS.items() if exhibit.stage == stage]
    if numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise ValueError(f"the exhibits of {stage} are not in one run: {numbers}")
    return f"{numbers[0]} to {numbers[-1]}"


MEASURED = referee, launches, slow_rank, sweep, machines, restarts
COMPUTED = memory_peaks, memory_state, hybrid, offload, plan_validation, plan_summary, plan_groups, plan_missed
SAID = article, other_claims, claims, changes_between, outline, exhibits, exhibits_of, conformance, conformance_differs
BLOCKS: dict[str, Callable[..., str]] = {
    block.__name__.replace("_", "-"): block for block in (*MEASURED, *COMPUTED, *SAID)
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


@one_line(ValueError, OSError, KeyError)
def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 1 if --check finds a stale page; an error ends it with 2."""
    parser = Parser(prog="docs", description="Writes the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing, and say which pages are stale")
    options = parser.parse_args(argv)
    stale = 0
    for path in pages():
        name, old = path.relative_to(ROOT), path.read_text()
        new = generate(old, str(name))
        if new == old:
            continue
        stale += 1
        if options.check:
            print(f"stale: {name}; ./launch.sh docs writes it anew")
        else:
            path.write_text(new)
            print(f"written: {name}")
    if not stale:
        print(f"up to date: {len(pages())} pages")
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
