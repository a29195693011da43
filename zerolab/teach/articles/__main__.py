"""Runs the articles' claims and prints what holds, what holds under a condition, and what does not.

Run it: ./launch.sh articles
"""

import argparse
import itertools
import sys
import textwrap
import time
import warnings
from collections import Counter
from html import escape
from operator import itemgetter

from zerolab.measure import tables
from zerolab.run import commands, json_file
from zerolab.run.command_line import one_line
from zerolab.teach import written
from zerolab.teach.articles import CLAIMS, Claim

COLUMNS = ("article", "claim", "ran", "found", "verdict")
IN_WORDS = written.beside(__file__, "claims")["in_words"]


def arguments(claims: list[Claim], argv: list[str] | None = None) -> argparse.Namespace:
    """The command's options, `claims` among them. Raises ValueError for what cannot work."""
    options = commands.articles(argv)
    wanted = [text.lower() for text in options.only]
    options.claims = [one for one in claims if any(text in f"{one.article} {one.claim}".lower() for text in wanted)]
    if not options.claims:
        raise ValueError(f"--only {' '.join(options.only)!r} matches none of the {len(claims)} claims")
    return options


def row(claim: Claim) -> dict[str, str]:
    """Run one claim: {"article", "claim", "ran", "found", "verdict"}; what it raises becomes the verdict "error"."""
    try:
        found, verdict = claim.check()
    except Exception as error:
        found, verdict = f"{type(error).__name__}: {textwrap.shorten(str(error) or 'no message', 200)}", "error"
    return dict(zip(COLUMNS, (claim.article, claim.claim, claim.ran, found, verdict)))


def text(rows: list[dict]) -> str:
    """The table for a terminal: a paragraph per claim, under the title of its article."""
    lines = []
    for article, mine in itertools.groupby(rows, itemgetter("article")):
        lines += ["", article, "=" * len(article)]
        for one in mine:
            lines += ["", one["claim"]]
            for column in COLUMNS[2:]:
                lines.append(f"    {column:<9} {one[column]}")
    return tables.wrapped("\n".join([*lines, "", counts(rows)]))


def markdown(rows: list[dict]) -> str:
    """The table as GitHub shows it: one per article, folded under how many of its claims hold."""
    lines = []
    for article, mine in itertools.groupby(rows, itemgetter("article")):
        mine = list(mine)
        lines += ["<details>", f"<summary><b>{escape(article)}</b>: {counts(mine)}</summary>", ""]
        cells = [[one["claim"], one["ran"], one["found"], f"**{one['verdict']}**"] for one in mine]
        lines += [tables.markdown([COLUMNS[1:], *cells]), "", "</details>", ""]
    return "\n".join(lines)


def counts(rows: list[dict]) -> str:
    """In a few words how many claims there are, and of which verdicts."""
    verdicts = [one["verdict"] for one in rows]
    kinds = Counter("holds when" if verdict.startswith("holds when") else verdict for verdict in verdicts)
    found = [f"{kinds[kind]} {IN_WORDS[kind][kinds[kind] > 1]}" for kind in IN_WORDS if kinds[kind]]
    return f"{len(rows)} {'claim' if len(rows) == 1 else 'claims'}: {', '.join(found)}"


def main(argv: list[str] | None = None, claims: list[Claim] = CLAIMS) -> int:
    """Run the command; returns its exit status: 0, or 1 if a claim could not be run; bad options end it with 2."""
    with one_line(ValueError):
        options = arguments(claims, argv)
    rows, started = [], time.perf_counter()
    warnings.simplefilter("ignore")  # torch's, of what an article asks for: what a reader can use is in the row
    for number, claim in enumerate(options.claims, 1):
        print(f"[{number}/{len(options.claims)}] {claim.claim} ...", end="", flush=True, file=sys.stderr)
        began = time.perf_counter()
        rows.append(row(claim))
        print(f" {rows[-1]['verdict']} ({time.perf_counter() - began:.1f} s)", flush=True, file=sys.stderr)
    print((markdown if options.markdown else text)(rows), flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s", file=sys.stderr)
    with one_line(ValueError):
        json_file.write(options.json, rows)
    return int(any(one["verdict"] == "error" for one in rows))


if __name__ == "__main__":
    sys.exit(main())
