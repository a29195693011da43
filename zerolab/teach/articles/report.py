"""Runs claims, and shows what came out: what does not hold first, then article by article."""

from collections import Counter

from zerolab.measure import tables
from zerolab.teach.articles.claim import ARTICLES, DEPENDS, DOES_NOT_HOLD, HOLDS, Article, Claim

ERROR = "error"


def row(claim: Claim) -> dict:
    """A claim and its outcome, for the JSON. If its check raises an error, that is the outcome."""
    try:
        outcome = claim.check()
        verdict, found, why = outcome.verdict, outcome.found, outcome.why
    except Exception as error:
        verdict, found, why = ERROR, f"{type(error).__name__}: {error}", "The check could not run."
    sources = [{"article": article.title, "section": section} for article, section in claim.sources]
    return {
        "name": claim.name,
        "claim": claim.text,
        "sources": sources,
        "verdict": verdict,
        "found": found,
        "why": why,
    }


def count(rows: list[dict]) -> str:
    """How many claims there are, and how many hold."""
    verdicts = Counter(one["verdict"] for one in rows)
    noun = "claim" if len(rows) == 1 else "claims"
    found = f"{len(rows)} {noun}: {verdicts[HOLDS]} hold, {verdicts[DEPENDS]} depend on a condition, "
    found += f"{verdicts[DOES_NOT_HOLD]} do not hold"
    if verdicts[ERROR]:
        found += f", {verdicts[ERROR]} could not run"
    return found


def of_article(article: Article, rows: list[dict]) -> list[dict]:
    return [one for one in rows if any(source["article"] == article.title for source in one["sources"])]


def not_holding(rows: list[dict]) -> list[dict]:
    return [one for one in rows if one["verdict"] in (DOES_NOT_HOLD, ERROR)]


def text(rows: list[dict]) -> str:
    """The report for a terminal."""
    lines = [count(rows)]
    if not_holding(rows):
        lines += heading("These do not hold")
        for one in not_holding(rows):
            lines += paragraph(one)
    for article in ARTICLES:
        if mine := of_article(article, rows):
            lines += heading(article.title)
            for one in mine:
                lines += paragraph(one)
    return tables.wrapped("\n".join(lines))


def heading(title: str) -> list[str]:
    return ["", title, "=" * len(title)]


def paragraph(one: dict) -> list[str]:
    lines = ["", one["claim"], f"    {one['verdict']}: {one['found']}"]
    return [*lines, f"    {one['why']}"] if one["why"] else lines


def table_of_not_holding(rows: list[dict]) -> str:
    """Markdown: the claims that do not hold, and why."""
    cells = [["claim", "article", "measured", "why it does not hold"]]
    for one in not_holding(rows):
        articles = "; ".join(f"{source['article']}, *{source['section']}*" for source in one["sources"])
        cells.append([one["claim"], articles, one["found"], one["why"]])
    return tables.markdown(cells)


def table_of_article(article: Article, rows: list[dict]) -> str:
    """Markdown: the claims of an article, with their sections."""
    cells = [["claim", "section", "measured", "verdict"]]
    for one in of_article(article, rows):
        (section,) = [source["section"] for source in one["sources"] if source["article"] == article.title]
        verdict = f"**{one['verdict']}**" + (f". {one['why']}" if one["why"] else "")
        cells.append([one["claim"], section, one["found"], verdict])
    return tables.markdown(cells)
