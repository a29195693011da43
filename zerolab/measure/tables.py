"""Tables, as rows of cells: printed as text for a terminal, or as Markdown."""

import re
import shutil
import textwrap


def rows_of(things: list[dict[str, str]]) -> list[list[str]]:
    """Rows of cells from dicts {title: cell} with the same titles. The first row has the titles."""
    return [list(things[0]), *(list(cells.values()) for cells in things)]


def text(rows: list[list[str]], left: tuple[int, ...] = (0,), rule: bool = True) -> list[str]:
    """Lines for a terminal. The columns `left` are left-aligned, and a `rule` follows the first row.

    Columns that do not fit continue in a second table below, which repeats the first column.
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
    """The width of the terminal, but at most 120."""
    return min(120, shutil.get_terminal_size((120, 24)).columns)


def wrapped(message: str, columns: int | None = None) -> str:
    """The text with long lines wrapped, to the terminal's width or to `columns`. No word is broken.

    Continued lines are indented like the text of the first one: after "gather   ", for example.
    """
    lines, columns = [], columns or columns_here()
    for line in message.split("\n"):
        indent = " " * re.match(r" *(\S+ {2,})?", line).end()
        fits = len(line) <= columns
        lines += [line] if fits else textwrap.wrap(
            line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return "\n".join(lines)


def markdown(rows: list[list[str]]) -> str:
    """The table in GitHub's Markdown, with numbers right-aligned."""
    titles, *others = rows
    dashes = ["---", *("---:" if re.fullmatch(r"[\d.,]+", cell) else "---" for cell in others[0][1:])]
    cells = [titles, dashes, *([cell.replace("|", "\\|") for cell in row] for row in others)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def unit(nbytes: float) -> tuple[str, float]:
    """A unit for `nbytes`, and its size: GB of 10^9 from there on, else MB of 10^6."""
    return ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6)
