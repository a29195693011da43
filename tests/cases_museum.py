"""Run on every rank: another file's case with an exhibit in its stage's place, and an exhibit's own visit."""

import contextlib
import dataclasses
import datetime
import importlib
from unittest.mock import patch

import parts
import torch.distributed as dist

from harness.properties.property import Subject, examine, library
from harness.teach.museum import visit as bug
from harness.teach.museum.exhibits import EXHIBITS


def with_the_bug(number: int, module: str, name: str, arguments: dict) -> tuple[bool, object]:
    """(True, what the case returns) or (False, with what it fails) where the cases find the exhibit as their stage.

    Every rank returns, however the case ends on it, so that the pool can go on. An exhibit in which ranks part is run
    in a group of its own with a short timeout: what goes wrong there does not reach the next case.
    """
    exhibit = EXHIBITS[number]
    own = None
    if "timeout" in exhibit.differs:
        own = dist.new_group(timeout=datetime.timedelta(seconds=1), backend="gloo")

    class Exhibited(exhibit.wrong):
        def __init__(self, *arguments, group=None, **options):
            super().__init__(*arguments, group=own if group is None else group, **options)

    stages = {**parts.STAGES, exhibit.stage: Exhibited}
    module = importlib.import_module(module)
    with (
        patch.multiple(parts, STAGES=stages, **{exhibit.right.__name__: Exhibited}),
    ):
        try:
            return True, getattr(module, name)(**arguments)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"


_right: dict[str, dict] = {}  # what the right engines show, for several exhibits train alike


def visit(number: int) -> dict:
    """What the visitor sees on this rank in the first steps."""
    exhibit, rank = EXHIBITS[number], dist.get_rank()
    # the fourth is the first that compares no notes on the order of collectives in any exhibit
    exhibit = dataclasses.replace(exhibit, training={"steps": 4, **exhibit.training})
    key = repr((exhibit.stage, exhibit.options, exhibit.training))
    found = bug.visit(exhibit, rank, right=_right.get(key))
    _right[key] = found["right"]
    return found


def findings(number: int, name: str) -> list:
    """What the property `name`, with the first of its cases, finds wrong with an exhibit on this rank."""
    exhibit = EXHIBITS[number]
    own = None
    if "timeout" in exhibit.differs:
        own = dist.new_group(timeout=datetime.timedelta(seconds=1), backend="gloo")

    def build(model, optimizer_cls, group=None, **options):
        return exhibit.wrong(model, optimizer_cls, group=own if group is None else group, **options)

    more = {key: getattr(exhibit.wrong, key) for key in ("save", "load", "scaler") if hasattr(exhibit.wrong, key)}
    case = next(case for _, engine, case in library()[name].asked() if engine == exhibit.stage)
    more = {what: getattr(exhibit.wrong, what) for what in ("save", "load", "scaler") if hasattr(exhibit.wrong, what)}
    try:
        return examine(name, Subject(f"bug {number}", build, like=exhibit.stage, more=more), case)
    except Exception as error:
        if exhibit.differs.isdisjoint(("error", "timeout")):
            raise  # it may be a slip of the exhibit's own, which would look as if it were caught
        return [str(error)]
