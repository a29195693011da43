"""Run on every rank: what a property finds wrong with an exhibit, and an exhibit's own visit."""

import dataclasses
import datetime

import torch.distributed as dist

from harness.properties.property import Subject, examine, library
from harness.teach.museum import visit as bug
from harness.teach.museum.exhibits import EXHIBITS

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

    case = next(case for _, engine, case in library()[name].asked() if engine == exhibit.stage)
    more = {what: getattr(exhibit.wrong, what) for what in ("save", "load", "scaler") if hasattr(exhibit.wrong, what)}
    try:
        return examine(name, Subject(f"bug {number}", build, like=exhibit.stage, more=more), case)
    except Exception as error:
        if exhibit.differs.isdisjoint(("error", "timeout")):
            raise  # it may be a slip of the exhibit's own, which would look as if it were caught
        return [str(error)]
