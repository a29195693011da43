"""README.md and docs/: what is generated is up to date, links and commands lead somewhere, the README stays short."""

import re
import shlex
from pathlib import Path

import forked
import pytest
from door import typed

from harness.teach import docs

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [str(page.relative_to(ROOT)) for page in docs.pages()]

CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


# What is generated.


def test_what_is_generated_is_up_to_date_and_every_block_is_shown_somewhere():
    shown = set()
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert docs.generate(text, page) == text, f"{page}: ./launch.sh docs writes it anew"
        shown |= {block["name"] for block in docs.BLOCK.finditer(text)}
        # There GitHub takes the whole line for HTML, and shows it apart from its paragraph.
        assert re.findall(r"^<!-- generated: .*-->.+<!-- end -->", text, re.MULTILINE) == [], page
    assert shown == set(docs.BLOCKS)


def test_the_command_writes_says_and_refuses(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    page, readme = tmp_path / "docs" / "page.md", tmp_path / "README.md"
    page.write_text("There are <!-- generated: exhibits -->3<!-- end --> bugs, of ZeRO-2 numbers "
                    "<!-- generated: exhibits-of zero2 --><!-- end -->.\n")  # fmt: skip
    readme.write_text("# Nothing generated\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.main(["--check"]) == 1
    assert "stale: docs/page.md" in capsys.readouterr().out and ">3<" in page.read_text()  # it has written nothing
    assert docs.main([]) == 0 and "written: docs/page.md" in capsys.readouterr().out
    assert f">{docs.exhibits()}<" in page.read_text() and f">{docs.exhibits_of('zero2')}<" in page.read_text()
    assert docs.main(["--check"]) == 0 and "up to date: 2 pages" in capsys.readouterr().out
    for wrong, said in (
        ("<!-- generated: weather --><!-- end -->", "'weather'"),
        ("<!-- generated: claims -->", "end"),
    ):
        page.write_text(wrong)
        with pytest.raises(SystemExit, match="2"):
            docs.main([])
        assert said in capsys.readouterr().err and page.read_text() == wrong


def test_tables_are_measurements():
    """The README's table against the file it names: every number of an engine's row is one of its run's."""
    report = docs.result(docs.REFEREE)
    base = report["runs"]["ddp"]["step_ms"]
    rows = {row.split("`")[1]: row for row in README.read_text().splitlines() if row.startswith("| `")}
    assert len(rows) == 4 and "zero3" in rows  # four say enough; docs/measurements.md has all
    for name, row in rows.items():
        measured = report["runs"][name]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        held = sum(measured["held_bytes"].values())
        numbers = [held / 1e6, measured["peak_bytes"] / 1e6, measured["sent_bytes"] / 1e6, measured["step_ms"]]
        for cell, number in zip(cells[3:], [*numbers, measured["step_ms"] / base], strict=True):
            assert float(cell.replace(",", "")) == pytest.approx(number, abs=0.51 * 10 ** -len(cell.partition(".")[2]))
        assert (cells[2] == "0, to the bit") == (name != "ddp" and measured["difference"] == 0)


def test_the_readme_is_short_and_all_pages_are_narrow():
    text = README.read_text()
    assert len(text.splitlines()) <= 200 and len(text.split()) <= 2500
    for page in PAGES:
        text = (ROOT / page).read_text()
        for line in text.splitlines():
            assert not line.startswith("|") or len(re.findall(r"(?<!\\)\|", line)) <= 9, line  # 8 columns
        for line in CODE.sub("", text).splitlines():  # tables and code cannot be wrapped
            assert len(line) <= 120 or line.startswith(("|", "<summary>")), (page, line)


# Links.


def anchors(page: Path) -> set[str]:
    """GitHub's names for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    here, text = ROOT / page, CODE.sub("", (ROOT / page).read_text())
    named = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    for name in re.findall(r"\]\[([^\]]+)\]", text):
        assert name in named, name
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *named.values()]
    targets += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for target in targets:
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        place = (here.parent / file).resolve() if file else here
        assert place.exists() and place.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(place), target


def test_every_page_is_linked_from_the_readme_or_for_contributors():
    text = README.read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    assert [page for page in PAGES if page != "README.md" and f"({page})" not in text] == []


# Commands.


def commands(page: str) -> list[list[str]]:
    """The words behind each ./launch.sh of a page, up to a comment or the end of what is set as code."""
    text = (ROOT / page).read_text()
    blocks = [line.partition(" #")[0] for block in CODE.findall(text) for line in block.splitlines()]
    inline = re.findall(r"`([^`]+)`", CODE.sub("", text))
    found = []
    for line in [*blocks, *inline]:
        for tail in re.findall(r"\./launch\.sh\b([^;|&']*)", " ".join(line.split())):
            found.append(shlex.split(tail))
    return found


def offered() -> set[str]:
    """The commands that `./launch.sh help` lists."""
    _, said, _ = typed("help")
    listed = re.findall(r"^\./launch\.sh (\S+)", said, re.MULTILINE)
    return {name for names in listed for name in names.split("|") if re.fullmatch(r"[a-z]\w*", name)}


def test_every_command_that_a_page_names_is_there_and_every_command_is_named():
    known, named, options = offered(), set(), {}
    for command in known - {"help", "notebooks", "test"}:  # what stands behind these is Jupyter's and pytest's
        status, said, _ = typed(f"{command} --help")
        options[command] = set(re.findall(r"--[a-zA-Z-]+", said))
        assert status == 0 and "--help" in options[command], command
    for page in PAGES:
        for words in commands(page):
            if not words or words[0].startswith("-"):
                continue  # the referee
            named.add(words[0])
            for word in words[1:]:
                if word.startswith("--") and words[0] in options:
                    assert word.partition("=")[0] in options[words[0]], (page, words)
    assert named == known
    _, _, refused = typed("nonsense")
    assert set(refused.partition("there are: ")[2].strip().split(", ")) == known


# What the pages print and run.


def code(language: str, containing: str, page: Path = README) -> str:
    """The only block of this language with `containing` in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if containing in block)
    return block


def test_the_first_run_prints_what_the_readme_shows():
    result = forked.launch("zero1", "2", "--device", "cpu")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "torchrun --standalone --nproc-per-node 2 zero1.py --device cpu" in result.stdout
    assert "Warning" not in result.stderr
    printed = result.stdout.splitlines()
    for line in code("", "Step 1 forward").splitlines():
        assert line in printed, line


def test_the_readmes_script_trains(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(code("python", "init_process_group"))
    ranks = forked.on_ranks([str(script)], 2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    printed = ranks[0].stdout + ranks[1].stdout
    losses = dict(re.findall(r"rank (\d): loss ([\d.]+) on its own data, 4 tensors", printed))
    assert set(losses) == {"0", "1"} and losses["0"] != losses["1"], printed  # each rank has data of its own
    assert all(float(loss) < 8 for loss in losses.values())  # inputs.sum(1) has variance 10


@pytest.mark.parametrize("number", [4, pytest.param(8, marks=pytest.mark.thorough)])
def test_three_dimensions_train(tmp_path, number):
    script = tmp_path / "three_dimensions.py"
    script.write_text(code("python", "PipelineStage", ROOT / "docs" / "hybrid.md"))
    ranks = forked.on_ranks([str(script)], number)
    assert [rank.returncode for rank in ranks] == [0] * number, ranks
    found = re.findall(r"rank (\d): loss ([\d.]+)", "".join(rank.stdout for rank in ranks))
    losses = {int(rank): float(loss) for rank, loss in found}
    assert sorted(losses) == [rank for rank in range(number) if rank // (number // 4) % 2], found  # of the last part
    assert len(set(losses.values())) == 2 and max(losses.values()) < 1, losses  # a copy each; they begin at 2.2
