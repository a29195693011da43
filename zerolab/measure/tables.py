"""A table is rows of cells, said once; here are the two ways to show it: text in a terminal, and Markdown."""

import re
import shutil
import textwrap


def rows_of(things: list[dict[str, str]]) -> list[list[str]]:
    """The titles, and below them the cells of each thing: {title: cell}, with the same titles in all."""
    return [list(things[0]), *(list(cells.values()) for cells in things)]


def text(rows: list[list[str]], left: tuple[int, ...] = (0,), rule: bool = True) -> list[str]:
    """Lines for a terminal: the columns `left` to the left and the others to the right, a rule under the first row.

    Columns for which there is no room stand in a table below, which begins with the first column again.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    blocks, lines = [[0]], []
    for column in range(1, len(widths)):
        if sum(widths[one] + 2 for one in (*blocks[-1], column)) > columns_here() + 2:
            blocks.append([0])
        blocks[-1].append(column)
    for shown in blocks:
        lines.append("")
        below = len(lines) + 1
        for row in rows:
            cells = [row[n].ljust(widths[n]) if n in left else row[n].rjust(widths[n]) for n in shown]
            lines.append("  ".join(cells).rstrip())
        if rule:
            lines.insert(below, "-" * max(map(len, lines[below - 1 :])))
    return lines[1:]


def columns_here() -> int:
    """How wide a line may be: as the terminal, and 120 at most."""
    return min(120, shutil.get_terminal_size((120, 24)).columns)


def wrapped(said: str, columns: int | None = None) -> str:
    """A text in lines that fit, here or in so many columns. Those that do stay as they are, and no word is broken.

    What goes on in another line begins where the text of the first one did: behind "gather   ", say.
    """
    lines, columns = [], columns or columns_here()
    for line in said.split("\n"):
        begin = " " * re.match(r" *(\S+ {2,})?", line).end()
        fits = len(line) <= columns
        lines += [line] if fits else textwrap.wrap(
            line, columns, subsequent_indent=begin, break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return "\n".join(lines)


def markdown(rows: list[list[str]]) -> str:
    """The table as GitHub shows it, numbers to the right."""
    titles, *others = rows
    dashes = ["---", *("---:" if re.fullmatch(r"[\d.,]+", cell) else "---" for cell in others[0][1:])]
    cells = [titles, dashes, *([cell.replace("|", "\\|") for cell in row] for row in others)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def unit(nbytes: float) -> tuple[str, float]:
    """The unit for so many bytes, and its size: GB of 10^9 for many, else MB of 10^6."""
    return ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6)


def in_words(nbytes: float) -> str:
    """ "1.25 GB", "3.50 MB"."""
    name, size = unit(nbytes)
    return f"{nbytes / size:,.2f} {name}"
