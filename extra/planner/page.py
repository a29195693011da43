"""Compares predictions with published measurements, and generates the part of README.md that shows the errors.

    python -m extra.planner.page --predict   predicts the published rows again, into predicted.json: 10 minutes
    python -m extra.planner.page             writes the generated parts of README.md from predicted.json
    python -m extra.planner.page --check     writes nothing, and fails if README.md is not up to date

How a block is marked in the page: zerolab/teach/docs.py.
"""

import json
import statistics
import sys
import textwrap
from pathlib import Path

from extra.planner.predict import predict
from extra.planner.published import ROWS, Row
from zerolab.measure import tables
from zerolab.run.command_line import Parser, one_line
from zerolab.run.model import number_of_parameters
from zerolab.teach import docs

PAGE = Path(__file__).with_name("README.md")
PREDICTED = Path(__file__).with_name("predicted.json")
CLOSE = 0.08  # memory within this counts as predicted


def compare(row: Row) -> dict:
    """A published row and its prediction. An error of +0.1 means that the prediction is 10% too high."""
    found = predict(row.setup, row.cluster)
    peak = found.peak_bytes + 2 * number_of_parameters(row.setup.config) * row.keeps_low
    return {
        "model": row.model,
        "gpus": row.setup.ranks,
        "engine": row.setup.engine,
        "published_tokens_per_s": row.tokens_per_s,
        "predicted_tokens_per_s": round(found.tokens_per_s, 1),
        "error": row.tokens_per_s and round(found.tokens_per_s / row.tokens_per_s - 1, 4),
        "published_peak_bytes": row.peak_bytes,
        "predicted_peak_bytes": peak,
        "memory_error": row.peak_bytes and round(peak / row.peak_bytes - 1, 4),
        "fits": found.fits,
    }


def size_of(row: Row) -> str:
    if row.setup.config.seq > 4096:
        return "sequences beyond 4,096"
    if row.setup.ranks <= row.cluster.per_node:
        return "one node"
    return "16 to 128 GPUs" if row.setup.ranks <= 128 else "256 and 512 GPUs"


def errors(found: list[float]) -> str:
    """ "median error 3.2%, largest 8.5% (64 rows)" """
    found = [abs(error) for error in found]
    return f"median error {statistics.median(found):.1%}, largest {max(found):.1%} ({len(found)} rows)"


def rows_and_predictions() -> list[tuple[Row, dict]]:
    return list(zip(ROWS, json.loads(PREDICTED.read_text()), strict=True))


def plan_summary() -> str:
    """The errors, in sentences."""
    ran = [(row, found) for row, found in rows_and_predictions() if row.tokens_per_s]
    failed = [found for row, found in rows_and_predictions() if not row.tokens_per_s]
    throughput = [(row.fitted, found["error"]) for row, found in ran]
    memory = [found["memory_error"] for _, found in ran if found["memory_error"] is not None]
    close = sum(abs(error) <= CLOSE for error in memory)
    sentences = [
        f"Tokens per second, rows not used in a fit: {errors([error for fitted, error in throughput if not fitted])}. "
        f"All rows: {errors([error for _, error in throughput])}.",
        f"Memory, for which nothing was fitted: {errors(memory)}, {close} within {CLOSE:.0%}.",
        f"Whether a run fits: predicted correctly for {sum(found['fits'] for _, found in ran)} of {len(ran)} that ran, "
        f"and for {sum(not found['fits'] for found in failed)} of {len(failed)} that did not fit.",
    ]
    return "\n".join(textwrap.fill(f"- {line}", 120, subsequent_indent="  ") for line in sentences)


def plan_groups() -> str:
    """A row per source and size: the errors of tokens per second."""
    groups: dict[tuple, list] = {}
    for row, found in rows_and_predictions():
        if row.tokens_per_s:
            groups.setdefault((row.source, size_of(row)), []).append((row, abs(found["error"])))
    table = [["source", "size", "rows", "of them fitted", "median error", "largest"]]
    for (source, size), some in groups.items():
        values = [error for _, error in some]
        fitted = sum(row.fitted for row, _ in some)
        numbers = [f"{statistics.median(values):.1%}", f"{max(values):.1%}"]
        table.append([source, size, str(len(some)), str(fitted), *numbers])
    return tables.markdown(table)


BLOCKS = {"plan-summary": plan_summary, "plan-groups": plan_groups}


@one_line(ValueError, OSError)
def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if --check finds something stale; an error ends it with 2."""
    parser = Parser("", description="Writes the generated parts of extra/planner/README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    parser.add_argument("--predict", action="store_true", help="first predict the published rows again")
    parser.usage = "python -m extra.planner.page [--check | --predict]"
    options = parser.parse_args(argv)
    if options.predict:
        found = []
        for number, row in enumerate(ROWS, 1):
            print(f"[{number}/{len(ROWS)}] {row.model}, {row.setup.ranks} GPUs, {row.setup.engine}", flush=True)
            found.append(compare(row))
        PREDICTED.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    return int(docs.update([PAGE], BLOCKS, "python -m extra.planner.page", options.check) > 0)


if __name__ == "__main__":
    sys.exit(main())
