"""Notebooks that open anywhere: their first cell, which finds the project or clones it, and what is checked before all.

The address of the project stands here and nowhere else. After a change of it:

    python -m harness.teach.anywhere      # writes the first cell, and the badge for Colab, into all notebooks
"""

import json
import os
from pathlib import Path

ADDRESS = ""  # of the git repository, as https://github.com/OWNER/zero-from-scratch; empty until there is one
NEEDED = (2, 11)  # torch
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"

FIRST_CELL = """# Finds the project; where the notebook was opened alone (Colab, Kaggle), clones it from ADDRESS.
import subprocess
import sys
from pathlib import Path

ADDRESS = "{address}"
here = Path.cwd()
folders = [here, *here.parents, here / "zero-from-scratch"]
project = next((folder for folder in folders if (folder / "zero1.py").exists()), None)
if project is None:
    if not ADDRESS:
        raise FileNotFoundError(f"no zero1.py above {{here}}: open this notebook in the project's folder")
    project = here / "zero-from-scratch"
    subprocess.run(["git", "clone", "--depth", "1", ADDRESS, str(project)], check=True)
sys.path.insert(0, str(project))"""


def first_cell() -> str:
    """The code of every notebook's first cell."""
    return FIRST_CELL.format(address=ADDRESS)


def badge(notebook: str) -> str:
    """The line under a notebook's title that opens it in Colab; "" as long as there is no address on GitHub."""
    place = ADDRESS.removeprefix("https://github.com/")
    if place == ADDRESS:
        return ""
    return f"{BADGE}(https://colab.research.google.com/github/{place}/blob/main/notebooks/{notebook})"


def write(file: Path) -> bool:
    """Bring the first cell and the badge of a notebook up to date; whether anything changed."""
    before = file.read_text(encoding="utf-8")
    cells = json.loads(before)
    by_id = {cell["id"]: cell for cell in cells["cells"]}
    by_id["find-project"]["source"] = first_cell().splitlines(keepends=True)
    title = [line for line in by_id["title"]["source"] if not line.startswith(BADGE)]
    if badge(file.name):
        title.insert(1, badge(file.name) + "\n")
    by_id["title"]["source"] = title
    after = json.dumps(cells, indent=1, ensure_ascii=False) + "\n"
    file.write_text(after, encoding="utf-8")
    return after != before


def ready(device: str | None = None) -> str:
    """The device for the runs of a notebook, "cpu" or "cuda"; prints what there is.

    `device` is the reader's choice; without one ZERO_NOTEBOOK_DEVICE, and without that "cpu", which works everywhere.
    Raises RuntimeError with one sentence for a torch that is too old, and for what is not there.
    """
    device = device or os.environ.get("ZERO_NOTEBOOK_DEVICE", "cpu")
    if os.name == "nt":
        raise RuntimeError("the runs of the notebooks are started by bash: open them in WSL, not in Windows itself")
    try:
        import matplotlib  # noqa: F401
        import torch
    except ImportError as error:
        raise RuntimeError(f"{error.name} is not installed: run `%pip install {error.name}` in a cell above") from error
    version = torch.__version__.split("+")[0]
    if tuple(int(part) for part in version.split(".")[:2]) < NEEDED:
        needed = ".".join(map(str, NEEDED))
        raise RuntimeError(
            f"torch {version} is installed, and {needed} or newer is needed: run `%pip install -U 'torch>={needed}'` "
            "in a cell above, then restart the kernel"
        )
    gpus = torch.cuda.device_count()
    if device not in ("cpu", "cuda"):
        raise RuntimeError(f'the device must be "cpu" or "cuda", got {device!r}')
    if device == "cuda" and not gpus:
        raise RuntimeError('"cuda" was chosen, and torch sees no GPU here: choose "cpu"')
    there = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "no GPU"
    choice = ' (for the GPU: anywhere.ready("cuda"))' if gpus and device == "cpu" else ""
    print(f"torch {version}, {os.cpu_count()} CPU cores, {there}. The runs use: {device}{choice}")
    return device


def main() -> None:
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        print(f"{'written' if write(file) else 'up to date'}: {file.name}")


if __name__ == "__main__":
    main()
