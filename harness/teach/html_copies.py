"""`./launch.sh notebooks --html [FOLDER]`: the notebooks, executed, as HTML pages for those who only read.

It takes minutes. ZERO_NOTEBOOK_PRESET and the other variables of docs/classroom.md make it shorter.
"""

import argparse
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"


def convert(file: Path, folder: Path) -> Path:
    """Execute one notebook where it lies and write it to `folder`; links between notebooks lead to the pages.

    Raises nbclient's CellExecutionError for a cell that fails.
    """
    import nbclient
    import nbformat
    from nbconvert import HTMLExporter

    cells = nbformat.read(file, as_version=4)
    where = {"metadata": {"path": str(file.parent)}}
    nbclient.NotebookClient(cells, timeout=None, coalesce_streams=True, resources=where).execute()
    page, _ = HTMLExporter().from_notebook_node(cells)
    page = re.sub(r'href="(\d\d_\w+)\.ipynb"', r'href="\1.html"', page)
    page = page.replace('href="../', f'href="{ROOT.as_uri()}/')
    written = folder / f"{file.stem}.html"
    written.write_text(page, encoding="utf-8")
    return written


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="notebooks --html", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=str(NOTEBOOKS / "html"), help="default: notebooks/html")
    parser.add_argument("--only", default="", metavar="TEXT", help="only notebooks with TEXT in their name")
    options = parser.parse_args(argv)
    files = sorted(file for file in NOTEBOOKS.glob("*.ipynb") if options.only in file.name)
    if not files:
        print(f"error: --only {options.only!r} matches no notebook", file=sys.stderr)
        return 2
    try:
        import ipykernel  # noqa: F401
        import nbclient
        import nbconvert  # noqa: F401

        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        print(f"error: {error.name} is not installed here: {sys.executable} -m pip install jupyter", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write to {options.folder!r}: {error.strerror}", file=sys.stderr)
        return 2
    failed = 0
    for file in files:
        began = time.monotonic()
        print(f"{file.stem} ...", end=" ", flush=True)
        try:
            written = convert(file, folder)
            print(f"{time.monotonic() - began:.0f} s, {written}", flush=True)
        except nbclient.exceptions.CellExecutionError as error:
            failed += 1
            print(f"failed: {error.ename}: {error.evalue}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
