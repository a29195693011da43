"""The TOML file next to a module."""

import tomllib
from pathlib import Path


def beside(file: str, name: str = "") -> dict:
    """The content of the TOML file next to `file`, with this name or with its own."""
    place = Path(file)
    return tomllib.loads(place.with_name(f"{name or place.stem}.toml").read_text())
