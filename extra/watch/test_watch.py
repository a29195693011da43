"""The recorded step: the recording on real ranks, and the page in a real browser."""

import ast
import json
import keyword
import re
from argparse import Namespace
from bisect import bisect_right
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typed_commands import mistake, typed

from extra.watch import blocks, chromium, page
from extra.watch.cell_ledger import LAYERS
from extra.watch.command import arguments
from extra.watch.merge_ranks import merge
from extra.watch.record_rank import record
from extra.watch.recordable import TITLES, of_engine, of_exhibit
from zerolab.measure.ledger import PARTS
from zerolab.run.pool import run_on_ranks
from zerolab.run.process_group import World
from zerolab.teach import watch_page
from zerolab.teach.museum.loop import Loop

# On the ranks.


def this_rank() -> World:
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")


def recorded(names: list[str]) -> list[dict]:
    """This rank's recording of one step of each engine."""
    options = Namespace(preset="toy", seq=32, batch=2, bucket_mb=None)
    return [record(of_engine(name, options), this_rank()) for name in names]


def museum_runs(number: int) -> list[dict]:
    """This rank's recordings of the correct engine and of the bug, of the step that the page shows."""
    runs = of_exhibit(number)
    assert all(type(run.loop(this_rank(), 1)) is Loop for run in runs)  # the museum's own: its models, data and steps
    return [record(run, this_rank()) for run in runs]


# The recordings.


@pytest.fixture(scope="module")
def recordings() -> dict[str, dict]:
    """Every engine, a small model, two ranks."""
    seen = run_on_ranks(2, recorded, names=list(TITLES))
    found = [merge(list(of_ranks), name, TITLES[name], {}) for name, of_ranks in zip(TITLES, zip(*seen))]
    return {recording["run"]: recording for recording in json.loads(json.dumps(found))}  # as they come out of a page


@pytest.fixture(scope="module")
def written(recordings, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("watch") / "page.html"
    file.write_text(page.build(list(recordings.values()), "zero3"), encoding="utf-8")
    return file


# The recording.


def ledger_at(recording: dict, rank: int, k: int) -> dict[str, int]:
    """Live bytes by part at event `k`, from the memory ledger."""
    time, now = recording["events"][k][0], dict.fromkeys(PARTS, 0)
    for moment, *pairs in recording["live"][rank]:
        if moment <= time:
            now.update({PARTS[part]: nbytes for part, nbytes in zip(pairs[::2], pairs[1::2])})
    return now


def cells_at(recording: dict, rank: int, k: int) -> dict[tuple, list[int]]:
    """{(row, column, layer): bytes in each cell} at event `k`, from the recording's changes."""
    time, now, ranks = recording["events"][k][0], {}, recording["ranks"]
    for moment, who, row, column, layer, cells in recording["changes"]:
        if moment <= time and who == rank:
            now[row, column, layer] = cells if isinstance(cells, list) else [cells] * ranks
    return now


@pytest.mark.parametrize("name", TITLES)
def test_every_byte_of_state_is_in_a_cell(recordings, name):
    """At every event the cells add up to the memory ledger's bytes, part by part, and nothing is left over."""
    recording = recordings[name]
    for rank in range(2):
        for k in range(len(recording["events"])):
            cells, ledger, found = cells_at(recording, rank, k), ledger_at(recording, rank, k), Counter()
            for (row, *place), each in cells.items():
                assert row >= 0 or not any(each)
                found[tuple(place)] += sum(each)
            assert all(found[place] == ledger[part] for part, place in LAYERS.items()), (name, rank, k)


def held(recording: dict, rank: int, k: int, column: int) -> list[list[bool]]:
    """Per row, which cells of a column are kept at event `k`, and full."""
    cells, rows = cells_at(recording, rank, k), recording["rows"]
    return [[nbytes >= 0.99 * row["cells"][column] for nbytes in cells.get((number, column, 0), [0, 0])]
            for number, row in enumerate(rows)]  # fmt: skip


def test_what_is_cut_is_what_the_stage_cuts(recordings):
    """After the update a rank keeps all cells, or its own cell, of parameters, gradients and optimizer state."""
    cut = {"ddp": (0, 0, 0), "zero1": (0, 0, 1), "zero2": (0, 1, 1), "zero3": (1, 1, 1), "fsdp2": (1, 1, 1)}
    for name, columns in cut.items():
        recording = recordings[name]
        for rank in range(2):
            k = next(i for i, event in enumerate(recording["events"]) if event[1:3] == [rank, "updated"])
            for column, is_cut in enumerate(columns):
                expected = [not is_cut or cell == rank for cell in range(2)]
                assert all(row == expected for row in held(recording, rank, k, column)), (name, rank, column)


def events_of(recording: dict, rank: int) -> list[tuple]:
    """(what, unit or row) of a rank's events, in order."""
    found, rows = [], [row["name"] for row in recording["rows"]]
    for _, who, what, *more in recording["events"]:
        if who == rank and what in ("issue", "end"):
            collective = recording["collectives"][more[0]]
            found.append((f"{what} {collective['kind']}", rows[collective["row"]]))
        elif who == rank and what == "free":
            found.append((f"free {more[1][0]}", rows[more[0]]))
        elif who == rank and what == "compute":
            found.append((more[1], more[0]))
    return found


WORDS = {"issue all-gather": "gather", "free 0": "free", "issue reduce-scatter": "reduce"}
WORDS |= {phase: phase for phase in ("forward", "backward")}
# Of the two blocks. With prefetch block 1 is on its way before block 0 computes, and block 0 before block 1's backward.
IN_ORDER = {
    "zero3": "gather 0, gather 1, forward 0, free 0, forward 1, free 1, "
    "gather 1, gather 0, backward 1, free 1, reduce 1, backward 0, free 0, reduce 0",
    "zero3-prefetch0": "gather 0, forward 0, free 0, gather 1, forward 1, free 1, "
    "gather 1, backward 1, free 1, reduce 1, gather 0, backward 0, free 0, reduce 0",
}


@pytest.mark.parametrize("name", (*IN_ORDER, "fsdp2"))
def test_collectives_and_frees_know_their_unit(recordings, name):
    """Two blocks of the same size: only their storages distinguish their collectives."""
    for rank in range(2):
        events = events_of(recordings[name], rank)
        assert [unit for what, unit in events if what == "issue reduce-scatter"] == ["blocks.1", "blocks.0", "root"]
        gathered = [unit for what, unit in events if what == "issue all-gather"]
        assert gathered == ["root", "blocks.0", "blocks.1", "blocks.1", "blocks.0"]
        for unit in ("blocks.0", "blocks.1"):
            mine = [what for what, whose in events if whose == unit]
            assert mine.index("end all-gather") < mine.index("forward")
            assert mine.index("backward") < mine.index("issue reduce-scatter") < mine.index("free 1")
            second = mine[mine.index("forward") + 1 :]
            # ZeRO-3 waits before it computes; FSDP2's backward begins with what needs no weight.
            asked = "issue all-gather" if name == "fsdp2" else "end all-gather"
            assert second.index(asked) < second.index("backward") < len(second) - second[::-1].index("free 0")
        if name in IN_ORDER:  # in FSDP2 a thread of gloo's may keep for a moment what was gathered
            blocks = [f"{WORDS[what]} {unit[-1]}" for what, unit in events if what in WORDS and unit != "root"]
            assert ", ".join(blocks) == IN_ORDER[name]


def test_the_version_of_the_weights(recordings):
    """In DDP a rank updates all cells, else its own. In ZeRO-1 and -2 a gather brings the other cell."""
    for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        recording = recordings[name]
        for rank in range(2):
            updated = next(i for i, event in enumerate(recording["events"]) if event[1:3] == [rank, "updated"])
            time, end = recording["events"][updated][0], recording["events"][-1][0]
            for row in range(len(recording["rows"])):
                looks = [(t, v if isinstance(v, list) else [v, v]) for t, who, where, layer, v in recording["versions"]
                         if (who, where, layer) == (rank, row, 0)]  # fmt: skip
                moments = [t for t, _ in looks]
                before = looks[bisect_right(moments, time - 1) - 1][1]
                at, after = looks[bisect_right(moments, time) - 1][1], looks[-1][1]
                own = [1 if cell == rank else -1 for cell in range(2)]
                if name in ("zero3", "fsdp2"):
                    assert before == [0 if v == 1 else -1 for v in own] and at == after == own
                else:
                    assert before == [0, 0] and after == [1, 1]
                    assert at == ([1, 1] if name == "ddp" else [max(v, 0) for v in own]), (name, rank, row)
                assert moments[-1] <= end + 1e6
        gathered = [v for _, _, _, layer, v in recording["versions"] if layer == 1]  # used only before the update
        assert all(v in (0, [0, 0]) for v in gathered) and bool(gathered) == (name in ("zero3", "fsdp2"))


# The command.


REFUSED = {  # the arguments of ./launch.sh watch: the message
    "zero4": "no engine 'zero4': did you mean zero",
    "zero3 --preset 70b": "are free on this machine: use --preset",
    "zero3 1": "N must be 2 to 16 ranks, got '1'",
    "zero3 2 --engines ddp,zero9": "no engine 'zero9'",
    "--bug 99": "no bug '99'",
    "--bug 25": "not in a step: ./launch.sh bug 25",
    "zero3 --bug 19": "leave out 'zero3'",
    "--seq 4000": "--seq must be 1 to 128 (preset tiny), got 4000",
    "--out /nowhere/page.html": "cannot write --out '/nowhere/page.html'",
    "--json /nowhere/page.json": "cannot write --json '/nowhere/page.json'",
    "--from README.md": "has no recordings",
    "--from {folder}/wrong.json": "has no recordings",
    "--from {folder}/latin.py": "has no recordings",
    "--bug 19 --preset toy": "--preset does nothing beside --bug",
    "--dark": "--dark does nothing without --gif",
    "--engines ,": "--engines is empty",
    "--gif page.webm": "--gif must name a file that ends with .gif, got 'page.webm'",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_answered_in_one_line(line, tmp_path):
    files = {"wrong.json": b'{"something": "else"}', "latin.py": b"# \xe9\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert REFUSED[line] in mistake("watch " + line.format(folder=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {*files}, "nothing was written"


def test_its_own_page_names_files_and_commands_that_are_there():
    text = (Path(page.__file__).parent / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (Path(page.__file__).parent / target).exists(), target
    _, printed, _ = typed("watch --help")
    offered = set(re.findall(r"--[a-z-]+", printed))
    lines = re.findall(r"\./launch\.sh watch([^`#\n]*)", text)
    assert len(lines) >= 4 and offered
    for line in lines:
        assert set(re.findall(r"--[a-z-]+", line)) <= offered, line


def test_only_what_was_asked_for_is_recorded():
    assert arguments(["--engines", "zero1"]).names == ["zero1"] and arguments(["--engines", "ddp,zero1"]).opens == "ddp"
    assert arguments(["zero2", "--engines", "ddp"]).names == ["zero2", "ddp"] and arguments([]).opens == "zero3"
    notes = {number: of_exhibit(number)[1].about["note"] for number in (2, 4, 16)}  # 2 changes only numbers
    assert ["./launch.sh bug" in note for note in notes.values()] == [True, False, False]


# How many ranks update in the recorded step: correct ranks skip an overflow together, with bug 26 one does not.
UPDATED = {4: [2, 2], 21: [2, 0], 26: [0, 1]}


@pytest.mark.parametrize("number", UPDATED)
def test_a_bug_is_recorded_beside_the_right_engine(number):
    """Three kinds of bugs: one sends something else, one stops, and in one the ranks do not skip a step together."""
    right, wrong = zip(*run_on_ranks(2, museum_runs, number=number))
    assert [sum(seen["updated"] is not None for seen in each) for each in (right, wrong)] == UPDATED[number]
    for mine, theirs in zip(right, wrong):
        assert len(mine["collectives"]) != len(theirs["collectives"])
        assert mine["error"] is None and bool(theirs["error"]) == (number == 21)
    for seen in (right, wrong):
        events = merge([*seen], "run", "title", {})["events"]
        assert {rank for _, rank, what, *_ in events if what in ("over", "error")} == {0, 1}


# The page, in a browser.


@pytest.fixture(scope="module")
def browser(written):
    """A WebDriver of selenium with the page open."""
    if missing := chromium.missing():
        pytest.skip(missing)
    text = written.read_text()
    # Every error in a script is kept, from the first line on.
    catch = "<script>window.wrong=[];addEventListener('error',(e)=>wrong.push(String(e.message)));</script>"
    copy = written.with_name("caught.html")
    copy.write_text(text.replace("<head>", "<head>" + catch, 1))
    with chromium.started() as opened:
        opened.get(copy.as_uri())
        yield opened
        assert opened.execute_script("return wrong") == []


def press(browser, *keys: str) -> None:
    """Press keys, one after the other, wherever the focus is."""
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def wait_for(browser, script: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 100, 0.02).until(lambda opened: opened.execute_script(script), script)


# What is drawn, in pixels: for each rank, row, column and cell how much of the frame the two layers fill.
DRAWN = """
return watch.picture.panels.map((panel) => panel.rows.map(({columns}) => columns.map(({cells}) => cells.map((cell) => {
  const box = (shape) => { const b = shape.getBoundingClientRect(); return b.width * b.height; };
  const shown = (shape) => getComputedStyle(shape).display !== "none" && getComputedStyle(shape).fill !== "none";
  const inside = cell.heldWidth / cell.width * (cell.held.getAttribute("height") / cell.frame.getAttribute("height"));
  return [cell.held, cell.whole].map((shape, layer) =>
    shown(shape) ? box(shape) / shape.ownerSVGElement.getScreenCTM().a ** 2
      / (cell.width * cell.frame.getAttribute("height")) / (layer ? 1 : inside) : 0);
}))));
"""


def test_the_picture_is_what_the_ledger_says_at_every_event(browser, recordings):
    """For every engine. The drawn whole cells are compared with the ledger's bytes by part."""
    for name, recording in recordings.items():
        drawn = browser.execute_script(
            "const draw = () => {" + DRAWN + "};"
            "watch.open(arguments[0], 0);"
            "return watch.rec.events.map((_, k) => {"
            "  watch.go(k); return [watch.k, draw(), watch.state.ranks.map((world) => world.live)]; });",
            name,
        )
        for k, (at, ranks, live) in enumerate(drawn):
            assert at == k
            for rank, rows in enumerate(ranks):
                cells = cells_at(recording, rank, k)
                assert live[rank] == list(ledger_at(recording, rank, k).values())
                for part, (column, layer) in LAYERS.items():
                    for number, (row, drawn_row) in enumerate(zip(recording["rows"], rows)):
                        size, kept = row["cells"][column], cells.get((number, column, layer), [0, 0])
                        for cell in range(2):  # a second copy is shown as a number next to the cell, not as an area
                            expected = min(1, kept[cell] / size) if size else 0
                            found = drawn_row[column][cell][layer]
                            assert abs(found - expected) < 0.02, (name, k, rank, part, number, cell)


def test_every_cell_is_where_its_labels_say(browser, recordings):
    """Rank by rank, row by row under its name, column by column under its heading, cells from left to right."""
    browser.execute_script("watch.open('zero1', 0)")
    panels = browser.execute_script("""
        const box = (shape) => { const b = shape.getBoundingClientRect(); return [b.left, b.right, b.top, b.bottom]; };
        return watch.picture.panels.map((panel) => ({
          whole: box(panel.group.querySelector(".paper")),
          name: panel.group.querySelector(".name").textContent,
          labels: [...panel.group.querySelectorAll(".row")].map((text) => [text.textContent, ...box(text)]),
          columns: [...panel.group.querySelectorAll(".column")].map((text) => [text.textContent, ...box(text)]),
          frames: panel.rows.map((row) => row.columns.map(({cells}) => cells.map((cell) => box(cell.frame)))),
        }));""")
    rows = [row["name"] for row in recordings["zero1"]["rows"]]
    for rank, panel in enumerate(panels):
        assert panel["name"] == f"rank {rank}" and [label[0] for label in panel["labels"]] == rows
        assert [name for name, *_ in panel["columns"]] == ["parameters", "gradients", "optimizer state"]
        left, right, top, bottom = panel["whole"]
        for label, columns in zip(panel["labels"], panel["frames"]):
            last = label[2]  # where the row's name ends
            for column, cells in zip(panel["columns"], columns):
                middle = (column[1] + column[2]) / 2
                assert cells[0][0] < middle < cells[-1][1]
                for cell in cells:
                    assert last <= cell[0] + 0.5 and cell[1] < right and top < cell[2] and cell[3] < bottom
                    assert cell[2] < label[4] and label[3] < cell[3]  # as high as the name
                    last = cell[1]


def test_what_stands_beside_is_at_the_same_computation(browser, recordings):
    """At every event the other engine has begun the same number of computations on rank 0."""
    begun = {name: [0] for name in ("zero3", "ddp")}
    for name, counts in begun.items():
        for _, rank, what, *_ in recordings[name]["events"]:
            counts.append(counts[-1] + (rank == 0 and what in ("compute", "updated")))
    other = browser.execute_script(
        "const [a, b] = ['zero3', 'ddp'].map((run) => watch.recordings.find((rec) => rec.run === run));"
        "return a.events.map((_, k) => sameMoment(a, k, b));"
    )
    assert all(begun["zero3"][k + 1] == begun["ddp"][there + 1] for k, there in enumerate(other))


def test_a_collective_moves_from_the_last_ranks_issue_on(browser, recordings):
    recording = recordings["zero3"]
    browser.execute_script("watch.open('zero3', 0)")
    moved = 0
    for k, (_, rank, what, *subject) in enumerate(recording["events"]):
        if what != "issue":
            continue
        caption, flying, states = browser.execute_script(
            "watch.go(arguments[0]); return [document.getElementById('caption').textContent,"
            "watch.picture.paths().length, watch.state.collectives[arguments[1]].status]", k, subject[0])  # fmt: skip
        marked = browser.execute_script(
            "return [...document.querySelectorAll('#picture .moving')].map((e) => e.className.baseVal)"
        )
        issued = [e[1] for e in recording["events"][: k + 1] if e[2:] == ["issue", subject[0]]]
        if len(issued) == 2:
            assert "moving" in states and flying > 0 and "all ranks have started it" in caption
            assert "moving moving" in marked
            moved += 1
        else:
            assert (
                states[rank] == "waiting"
                and states[1 - rank] == ""
                and f"rank {1 - rank} has not started it" in caption
            )
            assert "moving waiting" in marked
    assert moved == len(recording["collectives"])


LOOK = "return [watch.rec.run, watch.k, watch.playing]"
BESIDE = "return [watch.beside?.rec.run ?? null, document.getElementById('second').hidden]"


def test_every_control(browser, recordings):
    count = len(recordings["zero2"]["events"])

    def change(element: str, value: str, event: str = "change") -> None:
        script = "const [id, value, event] = arguments, e = document.getElementById(id); e.value = value;"
        browser.execute_script(script + "e.dispatchEvent(new Event(event))", element, value, event)

    def after(*clicks: str) -> list:
        for name in clicks:
            browser.find_element("id", name).click()
        return browser.execute_script(LOOK)

    browser.execute_script("watch.setBeside(''); watch.open('zero3', 0)")
    change("run", "zero2")
    assert after("first") == ["zero2", 0, False] and after("forth", "forth", "back")[1] == 1
    wait_for(browser, "return location.hash === '#event=2&run=zero2'")
    assert after("last")[1] == count - 1
    change("scrub", "7", "input")
    assert browser.execute_script(LOOK)[1] == 7
    change("speed", "4")  # the highest, from the start
    after("first", "play")
    wait_for(browser, "return watch.k >= 2")
    assert after("play")[2] is False
    # Again and again: a page that has just stopped may write its own address over it.
    wait_for(browser, "location.hash = '#event=5&run=ddp&beside=zero1'; return watch.rec.run === 'ddp'")
    assert browser.execute_script(LOOK)[1] == 4 and browser.execute_script(BESIDE) == ["zero1", False]
    assert browser.execute_script("return document.querySelectorAll('#lanes2 .bar').length") > 10
    below = "return document.getElementById('below').hidden"
    assert browser.execute_script(below) is False
    change("beside", "")
    assert browser.execute_script(BESIDE) == [None, True] and browser.execute_script(below) is True


TOP = """
const top = document.createElement("a");
top.tabIndex = -1;
document.body.prepend(top);
top.focus();
top.remove();
"""


def test_the_keyboard_alone(browser, recordings):
    """From the body on, without clicks. Scripts only read the page."""
    from selenium.webdriver import Keys

    browser.execute_script("document.activeElement.blur(); watch.setBeside('')")
    browser.execute_script("watch.open('zero3', 5); watch.play(false)")

    def after(*keys: str) -> list:
        press(browser, *keys)
        return browser.execute_script(LOOK)

    def value(element: str) -> str:
        return browser.execute_script("return document.getElementById(arguments[0]).value", element)

    assert after(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT) == ["zero3", 6, False]
    assert after(Keys.END)[1] == len(recordings["zero3"]["events"]) - 1
    assert after(Keys.HOME, " ")[2] is True and after(" ")[2] is False
    speed, pace = value("speed"), value("pace")
    after("-", "t")
    assert float(value("speed")) < float(speed) and value("pace") != pace
    assert after("e")[0] == [*TITLES][[*TITLES].index("zero3") + 1]
    assert after("E", "b")[0] == "zero3" and browser.execute_script(BESIDE)[0] == [*TITLES][0]
    assert (
        after("r")
        and browser.execute_script("return document.querySelector('#code .here').textContent")[:6] == "Rank 1"
    )
    after("r")
    browser.execute_script("watch.setBeside('')")
    # Every control can be reached by the Tab key, and shows it.
    press(browser, Keys.HOME)
    browser.execute_script(TOP)  # an earlier test may have clicked further down
    reached = []
    for _ in range(16):
        press(browser, Keys.TAB)
        reached.append(browser.execute_script("return document.activeElement.id"))
    assert {"run", "beside", "first", "back", "play", "forth", "last", "speed", "pace", "rank", "ask", "scrub"} <= {
        *reached
    }


def test_ask_me_first(browser, recordings):
    """Four answers, of which one is what the rank does next. After the answer the page continues."""
    from selenium.webdriver import Keys

    recording = recordings["zero3"]
    text = "return document.getElementById(arguments[0]).textContent"
    browser.execute_script("document.activeElement.blur(); watch.setBeside(''); watch.open('zero3', 0)")
    acts = browser.execute_script("return watch.rec.events.map((e) => [e[1], action(watch.rec, e)])")
    press(browser, "a")
    at_once = browser.execute_script("return [watch.k, watch.asked !== null, question(watch.rec, 1) !== null]")
    assert at_once[0] == 0 and at_once[1] == at_once[2]
    asked = 0
    while asked < 4:
        press(browser, Keys.ARROW_RIGHT)
        question = browser.execute_script("const q = watch.asked; return q && [q.k, q.answers, q.right]")
        if question is None:
            continue
        k, answers, right = question
        now = browser.execute_script("return watch.k")
        buttons = "return [...document.querySelectorAll('#answers button')].map((b) => b.textContent.slice(3))"
        assert k == now + 1 and browser.execute_script(buttons) == answers and len(set(answers)) == 4
        rank = recording["events"][k][1]
        assert browser.execute_script(text, "asked") == f"What does rank {rank} do next?"
        # This rank does all four in this recording, and the correct one comes next.
        assert acts[k][1] == answers[right] and {*answers} <= {act for who, act in acts if who == rank}
        given = right if asked % 2 else (right + 1) % 4
        press(browser, str(given + 1))
        assert browser.execute_script(text, "verdict").startswith("Right. " if given == right else "No. ")
        assert browser.execute_script("return watch.k") == now
        press(browser, Keys.ARROW_RIGHT)
        assert browser.execute_script("return [watch.k, watch.asked]") == [k, None]
        asked += 1
    press(browser, "a")


# The code next to the picture.


def labels_at(recording: dict, k: int) -> list[str]:
    """The labels in the code that is marked at event `k`, for example "send ". Empty where nothing is marked."""
    if recording["labelled"][k] < 0:
        return []
    found = []
    for chapter, _, first, _ in recording["blocks"][recording["labelled"][k]]:
        line = recording["chapters"][str(chapter)].splitlines()[first - 1]
        found += re.findall(r'record_function\(f?"([^{"]+)', line)
    return found


@pytest.mark.parametrize("name", TITLES)
def test_each_event_has_the_code_with_its_label(recordings, name):
    recording = recordings[name]
    if name in ("ddp", "fsdp2"):
        assert set(recording["labelled"]) == {-1} and recording["chapters"] == {}
        return
    seen = set()
    for k, (_, _, what, *more) in enumerate(recording["events"]):
        labels = labels_at(recording, k)
        seen.add(what)
        if what == "step":
            assert f"step {more[0]}" in labels
        elif what == "compute":
            assert labels == [{"forward": "step 1 forward", "backward": "step 2 backward"}[more[1]]]
        elif what == "issue":
            gathers = recording["collectives"][more[0]]["kind"] == "all-gather"
            assert ("gather " if gathers else "send ") in labels
        elif what == "free":
            assert labels == ["receive " if more[1][0] else "free "]
        elif what == "updated":
            assert labels == ["step 4 update the shard"]
        elif what == "over":
            assert labels == []
    assert {"step", "compute", "issue", "end", "updated", "over"} <= seen


def test_the_blocks_of_a_label():
    """In ZeRO-2 a label of ZeRO-2 has ZeRO-2's code, and one that only ZeRO-1 has, ZeRO-1's. The innermost counts."""
    made = blocks.blocks_of(2)
    (send,) = blocks.innermost(["step 2 backward", "step 3 reduce gradients", "send bucket 0"], made)
    assert (send.chapter, send.function) == (2, "send") and send.first < send.last
    (gather,) = blocks.innermost(["step 5 gather parameters", "gather bucket 1"], made)
    assert (gather.chapter, gather.function) == (1, "gather_parameters")
    assert {block.function for block in blocks.innermost(["step 3 reduce gradients"], made)} == {"send", "step"}
    assert blocks.innermost(["step 2 backward", "FSDP::all_gather"], made)[0].function == "training_step"
    assert (
        blocks.innermost(["Optimizer.step"], made) == [] == blocks.innermost(["step 1 forward"], blocks.blocks_of(None))
    )


def test_the_lines_with_the_label_are_marked_at_every_event(browser, recordings):
    """For every engine, rank and event: these lines, in this file, and the first of them inside the pane."""
    for name, recording in recordings.items():
        for rank in range(2):
            drawn = browser.execute_script(
                """
                watch.setBeside(''); watch.rank = arguments[1]; watch.open(arguments[0], 0);
                return watch.rec.events.map((_, k) => {
                  watch.go(k);
                  const pane = document.getElementById('code'), rows = [...pane.querySelectorAll('.line.at')];
                  const box = pane.querySelector('.source').getBoundingClientRect();
                  const inside = rows.slice(0, 1).every((row) => row.getBoundingClientRect().top >= box.top
                    && row.getBoundingClientRect().bottom <= box.bottom && row.offsetParent !== null);
                  const file = pane.querySelector('.tabs [aria-pressed=true]');
                  return [rows.map((row) => Number(row.dataset.line)), file && file.textContent, inside,
                    pane.querySelector('.here').textContent, pane.querySelector('.line.at.still') !== null,
                    rows.map((row) => row.querySelector('code').textContent)]; });""",
                name,
                rank,
            )
            now = -1
            for k, (rows, file, inside, here, still, code) in enumerate(drawn):
                mine = recording["events"][k][1] == rank
                now = recording["labelled"][k] if mine else now
                if name in ("ddp", "fsdp2"):
                    assert rows == [] and file is None and "is not in the chapters" in here
                elif now < 0:
                    assert rows == [] and here.startswith(f"Rank {rank}")
                else:
                    places = recording["blocks"][now]
                    expected = [line for _, _, first, last in places for line in range(first, last + 1)]
                    chapter, function, *_ = places[0]
                    assert (rows, file) == (expected, f"zero{chapter}.py"), (name, rank, k)
                    assert inside and still != mine and function in here
                    source = recording["chapters"][str(chapter)].splitlines()
                    assert code == [source[line - 1].strip() for line in expected]


def test_two_engines_have_two_panes(browser, recordings):
    """The second pane has the code of the second engine, at the same computation."""
    browser.execute_script("watch.rank = 0; watch.open('zero3', 10); watch.setBeside('zero1')")
    (first, second) = browser.execute_script("""
        return ['code', 'code2'].map((id) => {
          const pane = document.getElementById(id), tall = pane.getBoundingClientRect().height > 100;
          const [title, file] = ['h2', '.tabs [aria-pressed=true]'].map((each) => pane.querySelector(each).textContent);
          return [title, file, tall]; });
        """)
    assert first[0] == TITLES["zero3"] and second == [TITLES["zero1"], "zero1.py", True]
    browser.execute_script("watch.setBeside('')")
    assert browser.execute_script("return document.getElementById('code2').hidden")


def test_docstrings_are_folded(browser, recordings):
    text = recordings["zero3"]["chapters"]["3"].splitlines()
    last = next(number for number, code in enumerate(text[1:], 2) if code.endswith('"""'))
    shown = """watch.setBeside(''); watch.open('zero3', 3); watch.code.open(3);
        const rows = watch.code.files[3].rows, shown = () => rows.slice(1, arguments[0] + 1).map((r) => !r.hidden);
        const before = shown(); rows[1].querySelector('.fold').click(); const after = shown();
        rows[1].querySelector('.fold').click(); return [before, after, shown()];"""
    before, after, again = browser.execute_script(shown, last)
    assert before == again == [True] + [False] * (last - 1) and after == [True] * last


def test_the_colours_leave_the_text_as_it_is(browser, recordings):
    kinds = Counter()
    for source in recordings["zero3"]["chapters"].values():
        pieces = browser.execute_script("return coloured(arguments[0])", source)
        assert ["".join(text for _, text in line) for line in pieces] == source.split("\n")
        kinds.update(kind for line in pieces for kind, _ in line)
        for kind, text in (piece for line in pieces for piece in line):
            assert kind != "keyword" or text in keyword.kwlist
    assert min(kinds[kind] for kind in ("comment", "string", "keyword", "defined", "self", "digits")) > 5


def test_it_needs_nothing_from_outside(written, browser):
    """No address of anything to load, also inside a notebook's frame."""
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded == []
    frame = watch_page.show(written, run="ddp", event=3)._repr_html_()
    browser.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", frame)
    caption = "document.querySelector('iframe').contentDocument?.querySelector('#caption')?.textContent"
    wait_for(browser, f"return Boolean({caption})")
    inner = "document.querySelector('iframe').contentDocument"
    assert browser.execute_script(f"return {inner}.getElementById('run').value") == "ddp"
    assert browser.execute_script(f"return {inner}.getElementById('count').textContent").startswith("event 3 of ")
    browser.execute_script("document.querySelector('iframe').remove()")


def test_the_ready_page_is_what_the_templates_make():
    """docs/watch.html needs nothing to be installed, and is made of the present scripts."""
    recordings = page.recordings_of(watch_page.READY)
    assert watch_page.READY.read_text(encoding="utf-8") == page.build(recordings, "zero3")
    assert {recording["run"] for recording in recordings} == set(TITLES)


def code_only(source: str) -> str:
    """Without docstrings and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def test_the_ready_page_has_the_chapters_code():
    """If this fails, record again: the README next to this file has the command."""
    for recording in page.recordings_of(watch_page.READY):
        for number, source in recording["chapters"].items():
            assert code_only(source) == code_only(Path(f"zero{number}.py").read_text()), recording["run"]


def test_the_folder_of_pages_has_a_first_page():
    """docs/ can be served without changes: its index leads to the recorded step and to the pages in README."""
    docs = watch_page.READY.parent
    links = re.findall(r'href="([^"#]+)', (docs / "index.html").read_text())
    assert "watch.html" in links and any("README" in link for link in links)
    for link in links:
        assert link.startswith("https:") or (docs / link).exists(), link
