"""The recorded step: the recording on real ranks, and the page in a real browser."""

import ast
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typed_commands import mistake

from extra.watch import blocks, chromium, page
from extra.watch.cell_ledger import LAYERS
from extra.watch.merge_ranks import merge
from extra.watch.record_rank import record
from extra.watch.recordable import TITLES, of_engine, of_exhibit
from extra.watch.watch_options import arguments
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
    return [record(of_engine(name, "toy"), this_rank()) for name in names]


def museum_runs(number: int) -> list[dict]:
    """This rank's recordings of the correct engine and of the bug, of the step that the page shows."""
    runs = of_exhibit(number)
    assert all(type(run.loop(this_rank(), 1)) is Loop for run in runs)  # the museum's own: its models, data and steps
    return [record(run, this_rank()) for run in runs]


# The recordings.


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple]:
    """What two ranks have recorded of every engine, with a small model."""
    return dict(zip(TITLES, zip(*run_on_ranks(2, recorded, names=list(TITLES)))))


@pytest.fixture(scope="module")
def recordings(seen) -> dict[str, dict]:
    found = [merge([*of_ranks], name, TITLES[name], {}) for name, of_ranks in seen.items()]
    return {recording["run"]: recording for recording in json.loads(json.dumps(found))}  # as they come out of a page


@pytest.fixture(scope="module")
def written(recordings, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("watch") / "page.html"
    file.write_text(page.build(list(recordings.values()), "zero3"), encoding="utf-8")
    return file


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
            ledger, found = ledger_at(recording, rank, k), Counter()
            for (_, *place), each in cells_at(recording, rank, k).items():
                found[tuple(place)] += sum(each)
            assert all(found[place] == ledger[part] for part, place in LAYERS.items()), (name, rank, k)


def test_the_curve_has_the_peak_which_may_be_between_two_events(recordings, seen):
    for name, recording in recordings.items():
        for rank in range(2):
            now, peak = {}, 0
            for _, *pairs in recording["live"][rank]:
                now |= dict(zip(pairs[::2], pairs[1::2]))
                peak = max(peak, sum(now.values()))
            assert peak == max(sum(parts.values()) for _, parts in seen[name][rank]["live"]), name


def test_what_is_cut_is_what_the_stage_cuts(recordings):
    """After the update a rank keeps all cells, or its own cell, of parameters, gradients and optimizer state."""
    cut = {"ddp": (0, 0, 0), "zero1": (0, 0, 1), "zero2": (0, 1, 1), "zero3": (1, 1, 1), "fsdp2": (1, 1, 1)}
    for name, columns in cut.items():
        recording = recordings[name]
        for rank in range(2):
            k = next(i for i, event in enumerate(recording["events"]) if event[1:3] == [rank, "updated"])
            cells = cells_at(recording, rank, k)
            for number, row in enumerate(recording["rows"]):
                for column, is_cut in enumerate(columns):
                    full = [nbytes >= 0.99 * row["cells"][column] for nbytes in cells[number, column, 0]]
                    assert full == [not is_cut or cell == rank for cell in range(2)], (name, rank, number, column)


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


SHORT = {"issue all-gather": "gather", "free 0": "free", "issue reduce-scatter": "reduce"}
SHORT |= {phase: phase for phase in ("forward", "backward")}
# Of the two blocks. With prefetch block 1 is on its way before block 0 computes, and block 0 before block 1's backward.
IN_ORDER = {
    "zero3": "gather 0, gather 1, forward 0, free 0, forward 1, free 1, "
    "gather 1, gather 0, backward 1, free 1, reduce 1, backward 0, free 0, reduce 0",
    "zero3-prefetch0": "gather 0, forward 0, free 0, gather 1, forward 1, free 1, "
    "gather 1, backward 1, free 1, reduce 1, gather 0, backward 0, free 0, reduce 0",
}


def test_collectives_and_frees_know_their_unit(recordings):
    """Two blocks of the same size: only their storages distinguish their collectives."""
    for rank in range(2):
        for name, expected in IN_ORDER.items():
            events = events_of(recordings[name], rank)
            found = [f"{SHORT[what]} {unit[-1]}" for what, unit in events if what in SHORT and unit != "root"]
            assert ", ".join(found) == expected
        events = events_of(recordings["fsdp2"], rank)  # a thread of gloo's may keep for a moment what was gathered
        assert [unit for what, unit in events if what == "issue reduce-scatter"] == ["blocks.1", "blocks.0", "root"]
        gathered = [unit for what, unit in events if what == "issue all-gather"]
        assert gathered == ["root", "blocks.0", "blocks.1", "blocks.1", "blocks.0"]


# How many ranks update in the recorded step: with bug 21 one rank stops.
UPDATED = {4: [2, 2], 21: [2, 0]}


@pytest.mark.parametrize("number", UPDATED)
def test_a_bug_is_recorded_beside_the_right_engine(number):
    right, wrong = zip(*run_on_ranks(2, museum_runs, number=number))
    assert [sum(seen["updated"] is not None for seen in each) for each in (right, wrong)] == UPDATED[number]
    for mine, theirs in zip(right, wrong):
        assert len(mine["collectives"]) != len(theirs["collectives"])
        assert mine["error"] is None and bool(theirs["error"]) == (number == 21)
    for seen in (right, wrong):
        events = merge([*seen], "run", "title", {})["events"]
        assert {rank for _, rank, what, *_ in events if what in ("over", "error")} == {0, 1}


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
    for k, (_, _, what, *more) in enumerate(recording["events"]):
        labels = labels_at(recording, k)
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
    assert {"step", "compute", "issue", "end", "updated", "over"} <= {event[2] for event in recording["events"]}


def test_the_blocks_of_a_label():
    """In ZeRO-2 a label of ZeRO-2 has ZeRO-2's code, and one that only ZeRO-1 has, ZeRO-1's. The innermost counts."""
    made = blocks.blocks_of(2)
    (send,) = blocks.innermost(["step 2 backward", "step 3 reduce gradients", "send bucket 0"], made)
    assert (send.chapter, send.function) == (2, "send") and send.first < send.last
    (gather,) = blocks.innermost(["step 5 gather parameters", "gather bucket 1"], made)
    assert (gather.chapter, gather.function) == (1, "gather_parameters")
    assert {block.function for block in blocks.innermost(["step 3 reduce gradients"], made)} == {"send", "step"}
    assert blocks.innermost(["Optimizer.step"], made) == []


# The command.


REFUSED = {  # the arguments of ./launch.sh watch: the message
    "zero4": "no engine 'zero4': did you mean zero",
    "zero3 1": "N must be 2 to 16 ranks, got '1'",
    "--bug 99": "no bug '99'",
    "--bug 25": "not in a step: ./launch.sh bug 25",
    "zero3 --bug 19": "leave out 'zero3'",
    "--bug 19 --preset toy": "--preset does nothing beside --bug",
    "--preset 7b": "'7b'",
    "--out /nowhere/page.html": "cannot write --out '/nowhere/page.html'",
    "--from README.md": "has no recordings",
    "--from docs/watch.html --bug 16": "has no recording of 'bug16'",
    "--engines ,": "--engines is empty",
    "--gif page.webm": "--gif must name a file that ends with .gif, got 'page.webm'",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_answered_in_one_line(line):
    assert REFUSED[line] in mistake(f"watch {line}")


def test_its_own_page_names_files_and_commands_that_are_there():
    folder = Path(page.__file__).parent
    text = (folder / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (folder / target).exists(), target
    lines = re.findall(r"^\./launch\.sh watch([^#\n]*)", text, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        if "--help" not in line:
            arguments(shlex.split(line))


def test_only_the_named_engines_are_recorded():
    assert arguments(["--engines", "zero1"]).names == ["zero1"] and arguments(["--engines", "ddp,zero1"]).opens == "ddp"
    assert arguments(["zero2", "--engines", "ddp"]).names == ["zero2", "ddp"] and arguments(["4"]).opens == "zero3"


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


# For each rank, row, column and cell how much of it each of the two layers fills.
DRAWN = """
watch.open(arguments[0], 0);
return watch.rec.events.map((_, k) => {
  watch.go(k);
  const drawn = watch.picture.panels.map((panel) => panel.rows.map(({columns}) => columns.map(({cells}) =>
    cells.map((cell) => [cell.held.getAttribute("width") / cell.heldWidth,
                         cell.whole.getAttribute("width") / cell.width]))));
  return [watch.k, drawn, watch.state.ranks.map((world) => world.live)]; });
"""


def test_the_picture_is_what_the_ledger_says_at_every_event(browser, recordings):
    """For every engine: the drawn cells as recorded, and the bytes by part as in the ledger."""
    for name, recording in recordings.items():
        for k, (at, ranks, live) in enumerate(browser.execute_script(DRAWN, name)):
            assert at == k
            for rank, rows in enumerate(ranks):
                cells = cells_at(recording, rank, k)
                assert live[rank] == list(ledger_at(recording, rank, k).values())
                for column, layer in LAYERS.values():
                    for number, (row, drawn) in enumerate(zip(recording["rows"], rows)):
                        size, kept = row["cells"][column], cells.get((number, column, layer), [0, 0])
                        # A second copy is shown as a number next to the cell, not as an area.
                        expected = [min(1, nbytes / size) if size else 0 for nbytes in kept]
                        assert [cell[layer] for cell in drawn[column]] == pytest.approx(expected), (
                            name,
                            k,
                            rank,
                            number,
                        )


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
        if len([e for e in recording["events"][: k + 1] if e[2:] == ["issue", subject[0]]]) == 2:
            assert "moving" in states and flying > 0 and "all ranks have started it" in caption
            moved += 1
        else:
            assert states[rank] == "waiting" and f"rank {1 - rank} has not started it" in caption
    assert moved == len(recording["collectives"])


def test_the_lines_with_the_label_are_marked_at_every_event(browser, recordings):
    """For every engine, rank and event: these lines, in this file."""
    for name, recording in recordings.items():
        for rank in range(2):
            drawn = browser.execute_script(
                """
                watch.setBeside(''); watch.rank = arguments[1]; watch.open(arguments[0], 0);
                return watch.rec.events.map((_, k) => {
                  watch.go(k);
                  const pane = document.getElementById('code'), rows = [...pane.querySelectorAll('.line.at')];
                  const file = pane.querySelector('.tabs [aria-pressed=true]');
                  return [rows.map((row) => Number(row.dataset.line)), file && file.textContent,
                    rows.map((row) => row.querySelector('code').textContent)]; });""",
                name,
                rank,
            )
            now = -1
            for k, (rows, file, code) in enumerate(drawn):
                now = recording["labelled"][k] if recording["events"][k][1] == rank else now
                if now < 0:
                    assert rows == []
                    continue
                places = recording["blocks"][now]
                chapter = places[0][0]
                expected = [line for _, _, first, last in places for line in range(first, last + 1)]
                assert (rows, file) == (expected, f"zero{chapter}.py"), (name, rank, k)
                source = recording["chapters"][str(chapter)].splitlines()
                assert code == [source[line - 1].strip() for line in expected]


def test_the_second_engine_is_at_the_same_computation(browser, recordings):
    """At every event the other engine has begun the same number of computations on rank 0."""
    begun = {name: [0] for name in ("zero3", "ddp")}
    for name, counts in begun.items():
        for _, rank, what, *_ in recordings[name]["events"]:
            counts.append(counts[-1] + (rank == 0 and what in ("compute", "updated")))
    other, same = browser.execute_script(
        "const [a, b] = ['zero3', 'ddp'].map((run) => watch.recordings.find((rec) => rec.run === run));"
        "return [b, a].map((to) => a.events.map((_, k) => sameMoment(a, k, to)));"
    )
    assert same == list(range(len(same)))
    assert all(begun["zero3"][k + 1] == begun["ddp"][there + 1] for k, there in enumerate(other))


def test_the_controls_and_the_address(browser, recordings):
    def change(element: str, value: str, event: str = "change") -> None:
        script = "const [id, value, event] = arguments, e = document.getElementById(id); e.value = value;"
        browser.execute_script(script + "e.dispatchEvent(new Event(event))", element, value, event)

    def after(*clicks: str) -> list:
        for name in clicks:
            browser.find_element("id", name).click()
        return browser.execute_script("return [watch.rec.run, watch.k, watch.playing]")

    browser.execute_script("watch.setBeside(''); watch.rank = 0; watch.open('zero3', 0)")
    change("run", "zero2")
    assert after("first") == ["zero2", 0, False] and after("forth", "forth", "back")[1] == 1
    wait_for(browser, "return location.hash === '#event=2&run=zero2'")
    assert after("last")[1] == len(recordings["zero2"]["events"]) - 1
    change("scrub", "7", "input")
    assert after()[1] == 7
    change("speed", "4")
    after("first", "play")
    wait_for(browser, "return watch.k >= 2")
    assert after("play")[2] is False
    # Again and again: a page that has just stopped may write its own address over it.
    wait_for(browser, "location.hash = '#event=5&run=ddp&beside=zero1'; return watch.rec.run === 'ddp'")
    assert after()[1] == 4 and browser.execute_script("return watch.beside.rec.run") == "zero1"
    titles = "return ['code', 'code2'].map((id) => document.getElementById(id).querySelector('h2').textContent)"
    assert browser.execute_script(titles) == [TITLES["ddp"], TITLES["zero1"]]
    change("beside", "")
    hidden = "return ['second', 'code2', 'below'].map((id) => document.getElementById(id).hidden)"
    assert browser.execute_script("return watch.beside") is None and browser.execute_script(hidden) == [True] * 3


def test_the_keyboard_alone(browser, recordings):
    """From the body on, without clicks. Scripts only read the page."""
    from selenium.webdriver import Keys

    browser.execute_script("document.activeElement.blur(); watch.setBeside('')")
    browser.execute_script("watch.rank = 0; watch.open('zero3', 5); watch.play(false)")

    def after(*keys: str) -> list:
        press(browser, *keys)
        return browser.execute_script("return [watch.rec.run, watch.k, watch.playing, watch.rank]")

    speed = "return Number(document.getElementById('speed').value)"
    assert after(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT) == ["zero3", 6, False, 0]
    assert after(Keys.END)[1] == len(recordings["zero3"]["events"]) - 1
    assert after(Keys.HOME, " ")[2] is True and after(" ")[2] is False
    before = browser.execute_script(speed)
    after("-")
    assert browser.execute_script(speed) < before
    assert after("e")[0] == [*TITLES][[*TITLES].index("zero3") + 1]
    assert after("E", "b")[0] == "zero3" and browser.execute_script("return watch.beside.rec.run") == [*TITLES][0]
    assert after("r")[3] == 1 and after("r")[3] == 0
    browser.execute_script("watch.setBeside('')")


def test_ask_me_first(browser, recordings):
    """Four answers, of which one is what the rank does next. After the answer the page continues."""
    from selenium.webdriver import Keys

    recording = recordings["zero3"]
    text = "return document.getElementById(arguments[0]).textContent"
    browser.execute_script("document.activeElement.blur(); watch.setBeside(''); watch.open('zero3', 0)")
    acts = browser.execute_script("return watch.rec.events.map((e) => [e[1], action(watch.rec, e)])")
    press(browser, "a")
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


# The page in docs/.


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


def test_the_links_of_the_first_page_of_docs_work():
    docs = watch_page.READY.parent
    links = re.findall(r'href="([^"#]+)', (docs / "index.html").read_text())
    assert "watch.html" in links
    for link in links:
        assert link.startswith("https:") or (docs / link).exists(), link
