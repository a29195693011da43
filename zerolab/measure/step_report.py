"""Where the time of a step goes, as a table and in sentences, for the referee and the chapters."""

from zerolab.measure import tables

MOST_ROWS = 4  # ranks of one engine in the table; the JSON has all

LOOK_AT_OWN_WORK = """\
Look at own work: in synchronous training all ranks take as long as the slowest, so their step times are
equal; but a slow rank works longer, and the others wait for it.
"""
PARTS_OF_A_STEP = """\
own work: computation, optimizer, and the host between operations. waiting: another rank has not come to the
collective yet. exposed: bytes are on their way, and nothing is computed. overlapped: bytes are on their way
beside own work, which costs no time; in %: of all the time in which bytes are."""


def where_time_goes(result: dict) -> str:
    """Everything that the referee prints with --breakdown, from the result that it writes as JSON."""
    runs = {name: run["step_time"] for name, run in result["runs"].items() if run.get("step_time")}
    steps = next(iter(runs.values()))["steps"]
    rows, clear, unclear = [], [], []
    for name, found in runs.items():
        rows += _rank_rows(name, found)
        if stands_out(found):
            clear.append(f"{name}: {slowest_words(found)}")
        elif name != "single":
            unclear.append(name)
    begin = f"Where the time of a step goes, per rank, in ms: means of {steps} more step(s), which were watched."
    lines = [begin, LOOK_AT_OWN_WORK, *tables.text(tables.rows_of(rows)), PARTS_OF_A_STEP, *clear]
    if unclear:
        lines.append(f"No rank stands out: {', '.join(unclear)}.")
    if result["slow_rank"]:
        rank, seconds = result["slow_rank"]
        lines.append(f"--slow-rank: rank {rank} was delayed by {seconds * 1e3:g} ms in every timed step.")
        if "single" in runs:
            lines.append("single was not delayed: it is one process.")
    if unsure := max(found["clocks_unsure_by_ms"] for found in runs.values()):
        lines.append(f"The ranks' clocks are of several machines: waiting and exposed are right to {unsure:.3f} ms.")
    if any(row["overlapped"].startswith("<=") for row in rows):
        lines.append("<=: the backend does not say when these end, but when they are waited for: at most so long.")
    return "\n".join(lines)


def _rank_rows(name: str, found: dict) -> list[dict[str, str]]:
    rows, ranks = [], found["ranks"]
    if len(ranks) > MOST_ROWS:
        ranks = sorted(ranks, key=lambda rank: -rank["own_ms"])
        ranks = [*ranks[: MOST_ROWS - 1], ranks[-1]]  # those that work most, and the one that works least
    for rank in ranks:
        slowest = stands_out(found) and rank["rank"] == found["slowest_rank"]
        exposed, overlapped = sum(rank["exposed_ms"].values()), sum(rank["overlapped_ms"].values())
        least = "<=" if rank["told_late"] else ""
        rows.append({
            "engine": name,
            "rank": f"{rank['rank']} SLOWEST" if slowest else f"{rank['rank']}",
            "step": f"{rank['step_ms']:.1f}",
            "own work": f"{rank['own_ms']:.1f}",
            "waiting": f"{rank['waiting_ms']:.1f}",
            "exposed": f"{exposed:.1f}",
            "overlapped": f"{least}{overlapped:.1f}",
            "overlapped %": f"{least}{100 * overlapped / (exposed + overlapped):.0f}" if exposed + overlapped else "-",
        })  # fmt: skip
    return rows


def stands_out(found: dict) -> bool:
    """Whether one rank did more own work than every other in most of the steps, by 5% of a step or more."""
    if found["slowest_rank"] is None:
        return False
    step = max(rank["step_ms"] for rank in found["ranks"])
    return 2 * len(found["slowest_in_steps"]) > found["steps"] and found["lead_ms"] > 0.05 * step


def slowest_words(found: dict) -> str:
    """Which rank is the slowest, in how many steps and by how much; or that none stands out."""
    if len(found["ranks"]) < 2:
        return ""
    if not stands_out(found):
        return "No rank stands out."
    times = [rank["step_ms"] for rank in found["ranks"]]
    return (
        f"Rank {found['slowest_rank']} is the slowest, in {len(found['slowest_in_steps'])} of {found['steps']} "
        f"steps, by {found['lead_ms']:.1f} ms of own work; the ranks' step times, waiting included, are "
        f"{min(times):.1f} to {max(times):.1f}."
    )


def sentence(found: dict, rank: int) -> str:
    """Lines for a chapter's run: where `rank`'s time went, and whether others waited for someone."""
    own = next(row for row in found["ranks"] if row["rank"] == rank)
    exposed, overlapped = sum(own["exposed_ms"].values()), sum(own["overlapped_ms"].values())
    least = "at most " if own["told_late"] else ""
    lines = [
        f"where the time of a step goes (mean of {found['steps']} steps, which the instruments slow down):",
        f"of {own['step_ms']:.1f} ms {own['own_ms']:.1f} are this rank's own work, {own['waiting_ms']:.1f} waiting for "
        f"another rank, {exposed:.1f} waiting for bytes;",
        f"for {least}{overlapped:.1f} ms of its own work collectives were under way, too: that part cost no time.",
        slowest_words(found),
    ]
    return "\n".join(lines).rstrip()
