"""Runs the articles' claims and prints which hold, which depend on a condition, and which do not hold.

Run it: ./launch.sh articles
"""

import sys
import warnings

import torch

from zerolab.run import json_file
from zerolab.run.command_line import one_line
from zerolab.run.progress import with_progress
from zerolab.teach import articles_options
from zerolab.teach.articles import CLAIMS, report


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 if no claim was chosen."""
    with one_line(ValueError):
        options = articles_options.arguments(argv)
    chosen = [one for one in CLAIMS if any(text.lower() in f"{one.name} {one.text}".lower() for text in options.only)]
    if not chosen:
        print(f"error: --only {' '.join(options.only)!r} matches none of the claims", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")  # torch's, about what an article's code does
    rows = [report.row(claim) for claim in with_progress(chosen, "claims")]
    print(report.text(rows), flush=True)
    with one_line(ValueError):
        json_file.write(options.json, json_file.about(torch.device("cpu"), "articles") | {"claims": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
