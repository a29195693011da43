"""Merge the recordings of all ranks into one, on one clock, as plain JSON. `FORMAT` describes it.

The page computes everything that it shows from it.
"""

from bisect import bisect_left

from extra.watch.blocks import FILES, Block, blocks_of, innermost
from zerolab.measure.ledger import PARTS
from zerolab.measure.traffic import sent_bytes

FORMAT = """
run, title, about    its name in the address, its title, and how it was recorded
ranks, parts         how many ranks; what live bytes are for, in the order of `live`
shards               whether a rank owns a cell of each row; without (DDP) the cells are parts of what every rank has
rows                 units or buckets: {name, parameters, cells: [bytes of one cell of each column]}, a cell per rank
units                {unit: rows with parameters of it}
sent                 of each rank the bytes that it sends in the step
collectives          {kind, row, nbytes: of the whole buffer, step, issued: [of each rank], ended: [of each rank]}
work                 [rank, unit, step, begins, ends]: a rank computes
waits                [rank, begins, ends, collective]: a rank cannot go on without it
changes              [time, rank, row, column, layer, cells]: bytes from now on, a number if all cells have the same.
                     column 0 parameters, 1 gradients, 2 optimizer state; layer 0 is kept, 1 comes and goes
live                 for each rank [time, part, bytes from now on, part, bytes ...]: from the memory ledger
events               [time, rank, what, subject, more]; `what` is
                       step      subject: "2 backward"
                       compute   subject: the unit, more: "forward" or "backward"
                       issue     subject: number of the collective
                       end       subject: number of the collective, more: whether the rank was waiting for it
                       free      subject: the row, more: [column, bytes that were given back]
                       updated   the optimizer has written the new weights
                       over      the step is over
                       error     subject: what was raised
labelled             for each event an index into `blocks`, or -1 if no label of a chapter is open
blocks               of a label: [chapter, function, first line, last line] of each place that has it
chapters             {chapter: its source} of those that have such lines: 3 for zero3.py
Times are microseconds since the first rank began. Times before that are 0.
"""

PHASES = {"1": "forward", "2": "backward"}


def merge(ranks: list[dict], run: str, title: str, about: dict) -> dict:
    """One recording, from the results of `record_rank.record` on each rank."""
    origin = min(seen["started"] for seen in ranks)

    def at(seconds: float) -> int:
        return max(0, round((seconds - origin) * 1e6))

    with_labels = [pair for seen in ranks for pair in _events(seen, at)]
    with_labels.sort(key=lambda pair: pair[0][:2])
    events = [event for event, _ in with_labels]
    times = [event[0] for event in events]
    changes = [change for seen in ranks for change in _changes(seen, at, times)]
    return {
        "run": run,
        "title": title,
        "about": about,
        "ranks": len(ranks),
        "parts": list(PARTS),
        "shards": ranks[0]["shards"],
        "rows": _rows(ranks, changes),
        "units": ranks[0]["units"],
        "sent": [_sent(seen) for seen in ranks],
        "collectives": _collectives(ranks, at),
        "work": [line for seen in ranks for line in _work(seen, at)],
        "waits": [line for seen in ranks for line in _waits(seen, at)],
        "changes": sorted(changes, key=lambda change: change[0]),
        "live": [_live(seen, at, times) for seen in ranks],
        "events": events,
        **_code(blocks_of(ranks[0]["chapter"]), [labels for _, labels in with_labels]),
    }


def _sent(seen: dict) -> int:
    return round(
        sum(sent_bytes(kind, nbytes, len(group)) for kind, _, nbytes, _, _, _, group, *_ in seen["collectives"])
    )


def _work(seen: dict, at) -> list[list]:
    return [[seen["rank"], unit, step, at(begins), at(ends)] for unit, step, begins, ends in seen["work"]]


def _waits(seen: dict, at) -> list[list]:
    found = [[seen["rank"], at(begins), at(ends), which] for begins, ends, which in seen["waits"]]
    return [wait for wait in found if wait[2] > wait[1]]


def _collectives(ranks: list[dict], at) -> list[dict]:
    """A collective carries no name: the k-th one of this rank meets the k-th one of every other rank."""
    found = []
    for index in range(max(len(seen["collectives"]) for seen in ranks)):
        of = [seen["collectives"][index] if index < len(seen["collectives"]) else None for seen in ranks]
        kind, row, nbytes, step, *_ = next(each for each in of if each is not None)
        found.append({
            "kind": kind, "row": row, "nbytes": nbytes, "step": step,
            "issued": [None if each is None else at(each[4]) for each in of],
            "ended": [None if each is None else at(each[5]) for each in of],
        })  # fmt: skip
    return found


def _events(seen: dict, at) -> list[tuple[list, list]]:
    """(event, the labels that were open). A collective that ends in the background belongs to no label."""
    rank, events = seen["rank"], []
    end = 0.0
    for name, begins, ends, labels in seen["steps"]:
        if begins >= end:  # not inside another one
            events.append(([at(begins), rank, "step", name], labels))
            end = ends
    events += [
        ([at(begins), rank, "compute", unit, PHASES[step[:1]]], labels)
        for begins, unit, step, labels in seen["computations"]
    ]
    for index, (_, _, _, _, begins, ends, _, issued, ended) in enumerate(seen["collectives"]):
        events.append(([at(begins), rank, "issue", index], issued))
        if not seen["error"] or ends < seen["ends"]:
            waited = any(which == index and start <= ends <= stop for start, stop, which in seen["waits"])
            events.append(([at(ends), rank, "end", index, int(waited)], ended if waited else []))
    for moment, row, column, _, _, freed, nbytes, labels in seen["changes"]:
        if freed:
            events.append(([at(moment), rank, "free", row, [column, nbytes]], labels))
    if seen["updated"] is not None:
        events.append(([at(seen["updated"]), rank, "updated"], seen["updated_under"]))
    last = ("error", seen["error"]) if seen["error"] else ("over",)
    events.append(([at(seen["ends"]), rank, *last], []))
    return events


def _code(blocks: list[Block], all_labels: list[list[str]]) -> dict:
    """The chapters' lines with the innermost label of each event."""
    places, labelled = {}, []
    for labels in all_labels:
        found = tuple((block.chapter, block.function, block.first, block.last) for block in innermost(labels, blocks))
        labelled.append(places.setdefault(found, len(places)) if found else -1)
    chapters = sorted({chapter for found in places for chapter, *_ in found})
    sources = {str(chapter): FILES[chapter].read_text(encoding="utf-8") for chapter in chapters}
    return {"labelled": labelled, "blocks": [*places], "chapters": sources}


def _changes(seen: dict, at, times: list[int]) -> list[list]:
    """The last of the changes between two events, because the page cannot stop between them."""
    last = {}
    for moment, row, column, layer, cells, *_ in seen["changes"]:
        moment = at(moment)
        last[bisect_left(times, moment), row, column, layer] = (moment, cells)
    found, now = [], {}
    for (_, *key), (moment, cells) in sorted(last.items(), key=lambda item: item[0][0]):
        if now.get((*key,), [0] * len(cells)) != cells:
            now[(*key,)] = cells
            found.append([moment, seen["rank"], *key, _short(cells)])
    return found


def _short(cells: list[int]) -> int | list[int]:
    return cells[0] if len({*cells}) == 1 else cells


def _live(seen: dict, at, times: list[int]) -> list[list[int]]:
    """The ledger's bytes at every event, and at the highest moment between two events, as changes of the parts."""
    slots: dict[int, list] = {}  # index of the next event -> the highest point since the last one, and the last point
    for moment, parts in seen["live"]:
        point = at(moment), [parts.get(part, 0) for part in PARTS]
        slot = slots.setdefault(bisect_left(times, point[0]), [point, point])
        slot[1] = point
        if sum(point[1]) > sum(slot[0][1]):
            slot[0] = point
    found, now = [], [0] * len(PARTS)
    for moment, parts in (point for _, slot in sorted(slots.items()) for point in slot):
        changed = [value for pair in enumerate(parts) if pair[1] != now[pair[0]] for value in pair]
        if changed:
            found.append([moment, *changed])
        now = parts
    return found


def _rows(ranks: list[dict], changes: list[list]) -> list[dict]:
    number, rows = len(ranks), []
    for index, row in enumerate(ranks[0]["rows"]):
        state = [cells for _, _, where, column, _, cells in changes if (where, column) == (index, 2)]
        most = max((max(cells) if isinstance(cells, list) else cells for cells in state), default=0)
        whole = row["nbytes"] / number
        rows.append({"name": row["name"], "parameters": row["parameters"], "cells": [whole, whole, most]})
    return rows
