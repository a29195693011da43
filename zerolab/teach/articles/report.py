"""What came out of the claims: a row for the JSON, the report for a terminal, and the tables of docs/articles.md."""

from collections import Counter

from zerolab.measure import tables
from zerolab.teach.articles.claim import DEPENDS, DOES_NOT_HOLD, HOLDS, Claim


def row(claim: Claim) -> dict:
    """A claim and its outcome, for the JSON."""
    outcome = claim.check()
    return {
        "name": claim.name,
        "claim": claim.text,
        "sources": [{"article": title, "section": section} for title, section in claim.sources],
        "verdict": outcome.verdict,
        "found": outcome.found,
        "why": outcome.why,
    }


def count(rows: list[dict]) -> str:
    """How many claims there are, and how many hold."""
    verdicts = Counter(one["verdict"] for one in rows)
    noun = "claim" if len(rows) == 1 else "claims"
    return (
        f"{len(rows)} {noun}: {verdicts[HOLDS]} hold, {verdicts[DEPENDS]} depend on a condition, "
        f"{verdicts[DOES_NOT_HOLD]} do not hold"
    )


def text(rows: list[dict]) -> str:
    """The report for a terminal: first the claims that do not hold."""
    lines = [count(rows)]
    for one in sorted(rows, key=lambda one: one["verdict"] != DOES_NOT_HOLD):
        lines += ["", one["claim"], f"    {one['verdict']}: {one['found']}"]
        if one["why"]:
            lines.append(f"    {one['why']}")
    return tables.wrapped("\n".join(lines))


def table_of_not_holding(rows: list[dict]) -> str:
    """Markdown: the claims that do not hold, and why."""
    cells = [["claim", "article", "measured", "why it does not hold"]]
    for one in rows:
        if one["verdict"] == DOES_NOT_HOLD:
            articles = "; ".join(f"{source['article']}, *{source['section']}*" for source in one["sources"])
            cells.append([one["claim"], articles, one["found"], one["why"]])
    return tables.markdown(cells)


def table_of_article(title: str, rows: list[dict]) -> str:
    """Markdown: the claims of an article, with their sections."""
    cells = [["claim", "section", "measured", "verdict"]]
    for one in rows:
        for source in one["sources"]:
            if source["article"] == title:
                verdict = f"**{one['verdict']}**" + (f". {one['why']}" if one["why"] else "")
                cells.append([one["claim"], source["section"], one["found"], verdict])
    return tables.markdown(cells)
