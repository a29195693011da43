"""Runs the articles' claims and prints which hold, which depend on a condition, and which do not hold.

Run it: ./launch.sh articles
"""

import argparse
import sys
import time
import warnings

import torch

from zerolab.run import json_file
from zerolab.run.command_line import one_line
from zerolab.teach import articles_options
from zerolab.teach.articles import CLAIMS, report
from zerolab.teach.articles.claim import Claim


def chosen(claims: list[Claim], options: argparse.Namespace) -> list[Claim]:
    """The claims that the options ask for. Raises ValueError if there is none."""
    found = []
    for claim in claims:
        by_article = options.article in (None, *(article.key for article, _ in claim.sources))
        if by_article and articles_options.matches(options.only, claim.name, claim.text):
            found.append(claim)
    if not found:
        raise ValueError(f"--only {' '.join(options.only)!r} matches none of the claims of this article")
    return found


def main(argv: list[str] | None = None, claims: list[Claim] = CLAIMS) -> int:
    """Run the command; returns its exit status: 0, or 1 if a claim could not be run. Bad options end it with 2."""
    with one_line(ValueError):
        options = articles_options.arguments(argv)
        claims = chosen(claims, options)
    rows, started = [], time.perf_counter()
    warnings.simplefilter("ignore")  # torch's, about what an article's code does
    for number, claim in enumerate(claims, 1):
        print(f"[{number}/{len(claims)}] {claim.text} ...", end="", flush=True, file=sys.stderr)
        began = time.perf_counter()
        rows.append(report.row(claim))
        print(f" {rows[-1]['verdict']} ({time.perf_counter() - began:.1f} s)", flush=True, file=sys.stderr)
    print(report.text(rows), flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s", file=sys.stderr)
    with one_line(ValueError):
        json_file.write(options.json, json_file.about(torch.device("cpu"), "articles") | {"claims": rows})
    return int(any(one["verdict"] == report.ERROR for one in rows))


if __name__ == "__main__":
    sys.exit(main())
