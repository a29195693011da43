"""README.md and docs/: what is generated is up to date, links lead somewhere, and commands run."""

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import started
from typed_commands import python_arguments, typed

from zerolab.measure import figures
from zerolab.run.ranks import ROOT
from zerolab.teach import docs

CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in docs.pages()}
PROSE = {page: CODE.sub("", text) for page, text in PAGES.items()}


# What is generated.


def test_what_is_generated_is_up_to_date_and_every_block_is_shown_somewhere():
    shown = set()
    for page, text in PAGES.items():
        assert docs.generate(text, page) == text, f"{page}: run ./launch.sh docs"
        shown |= {block["name"] for block in docs.BLOCK.finditer(text)}
        # There GitHub takes the whole line for HTML, and shows it apart from its paragraph.
        assert re.findall(r"^<!-- generated: .*-->.+<!-- end -->", text, re.MULTILINE) == [], page
    assert shown == set(docs.BLOCKS)


def test_the_command_writes_reports_and_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("zerolab.measure.figures.FIGURES", {})  # they are drawn in the next test
    (tmp_path / "docs").mkdir()
    page, readme = tmp_path / "docs" / "page.md", tmp_path / "README.md"
    page.write_text("Two numbers: <!-- generated: largest 3 5 -->3<!-- end --> and "
                    "<!-- generated: largest 4 --><!-- end -->.\n")  # fmt: skip
    readme.write_text("# Nothing generated\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "BLOCKS", {"largest": lambda *numbers: max(numbers)})
    assert docs.main(["--check"]) == 1
    assert "stale: docs/page.md" in capsys.readouterr().out and ">3<" in page.read_text()  # it has written nothing
    assert docs.main([]) == 0 and f"written: {page}" in capsys.readouterr().out
    assert ">5<" in page.read_text() and ">4<" in page.read_text()
    assert docs.main(["--check"]) == 0 and "up to date: 2\n" in capsys.readouterr().out
    for wrong, message in (
        ("<!-- generated: weather --><!-- end -->", "'weather'"),
        ("<!-- generated: largest 1 -->", "end"),
    ):
        page.write_text(wrong)
        with pytest.raises(SystemExit, match="2"):
            docs.main([])
        assert message in capsys.readouterr().err and page.read_text() == wrong


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_is_drawn_from_its_files(name, tmp_path):
    assert figures.draw(name, tmp_path).exists()


def test_tables_are_measurements():
    """The README's table against the file it names: every number of an engine's row is one of its run's."""
    runs = docs.result(docs.LAUNCHES[0])["runs"]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGES["README.md"], re.MULTILINE)
    assert [name for name, _ in rows] == ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    for name, row in rows:
        run = runs[name]
        _, difference, *numbers = (cell.strip() for cell in row.split("|"))
        held, peak, sent = sum(run["held_bytes"].values()), run["peak_bytes"], run["sent_bytes"]
        assert numbers == [f"{held / 1e6:.2f}", f"{peak / 1e6:.2f}", f"{sent / 1e6:.2f}"]
        assert (difference == "0 (to the bit)") == (run["difference"] == 0)


# Links.


def anchors(page: Path) -> set[str]:
    """GitHub's names for the headings of a page, which may be in extra/."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = PROSE[page]
    named = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([^\]]+)\]", text)) <= set(named)
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *named.values()]
    for target in targets:
        file, _, anchor = target.partition("#")
        if file.startswith(("https://", "http://")):
            continue
        place = (ROOT / page).parent.joinpath(file).resolve() if file else ROOT / page
        assert place.exists() and place.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(place), target


def test_every_page_is_linked_from_the_readme_or_for_contributors():
    text = PAGES["README.md"] + (ROOT / "CONTRIBUTING.md").read_text()
    assert [page for page in PAGES if page != "README.md" and f"({page})" not in text] == []


# Commands.


def commands(page: str) -> list[list[str]]:
    """The words behind each ./launch.sh of a page, up to a comment or the end of what is set as code."""
    tails = []
    for part in [PROSE[page].replace("\n", " "), *CODE.findall(PAGES[page])]:
        tails += re.findall(r"\./launch\.sh\b([^;|&'\"#`<\n]*)", part)
    return [shlex.split(tail) for tail in tails]


def offered() -> set[str]:
    """The commands that `./launch.sh help` lists, one line each."""
    _, printed, _ = typed("help")
    listed = re.findall(r"^\./launch\.sh (\S+)", printed, re.MULTILINE)
    return {name for name in "|".join(listed).split("|") if re.fullmatch(r"[a-z]\w*", name)}


def test_every_command_that_a_page_names_is_there_and_every_command_is_named():
    known, named, options = offered(), set(), {}
    for command in known - {"help", "notebooks", "test"}:  # Jupyter and pytest read the options of these
        status, printed, _ = typed(f"{command} --help")
        options[command] = set(re.findall(r"--[a-zA-Z-]+", printed))
        assert status == 0 and "--help" in options[command], command
    for page in PAGES:
        for words in commands(page):
            if not words or words[0].startswith("-"):
                continue  # the referee
            named.add(words[0])
            for word in words[1:]:
                if word.startswith("--") and words[0] in options:
                    assert word.partition("=")[0] in options[words[0]], (page, words)
    assert named <= known
    _, _, refused = typed("nonsense")
    assert set(refused.partition("Use one of: ")[2].strip().split(", ")) == known


def test_the_examples_in_help_texts_can_be_typed():
    for command in offered() - {"help", "notebooks", "test"}:
        _, printed, _ = typed(f"{command} --help")
        examples = re.findall(r"^  \./launch\.sh (.*)", printed, re.MULTILINE)
        assert examples, command
        for example in examples:
            words = shlex.split(example, comments=True)
            assert words[0] == command and python_arguments(*words), example


# Output and scripts in the pages.


def code(containing: str, page: str = "README.md") -> str:
    """The only block of code with `containing` in it."""
    (block,) = (block for block in CODE.findall(PAGES[page]) if containing in block)
    return block.partition("\n")[2].removesuffix("```")


def losses(script: Path, text: str, number: int) -> dict[int, float]:
    """The losses that each rank prints. All ranks must reach the end of the script."""
    script.write_text(text)
    ranks = started.on_ranks([str(script)], number)
    assert [rank.returncode for rank in ranks] == [0] * number, ranks
    printed = "".join(rank.stdout for rank in ranks)
    found = re.findall(r"rank (\d): loss ([\d.]+)", printed)
    return {int(rank): float(loss) for rank, loss in found}


@pytest.mark.long
def test_the_script_with_save_and_resume_trains_and_resumes(tmp_path):
    script = code("checkpoint.complete", "docs/using-an-engine.md").replace('"runs/mine"', repr(str(tmp_path / "mine")))
    (tmp_path / "my_train.py").write_text(script.replace("range(first, 300)", "range(first, 200)"))
    steps = []
    for ranks in (2, 1):  # the second run has one rank
        ended = started.on_ranks([str(tmp_path / "my_train.py")], ranks)
        assert [rank.returncode for rank in ended] == [0] * ranks, ended
        printed = "".join(rank.stdout for rank in ended)
        steps.append([int(step) for step in re.findall(r"rank 0, step (\d+): loss", printed)])
        (tmp_path / "my_train.py").write_text(script)
    assert steps == [[100, 200], [300]]


@pytest.mark.long
def test_the_lines_for_muon_train(tmp_path):
    text = """
        import torch, torch.distributed as dist
        from zerolab.engine import ZeRO2Engine
        from zerolab.run.model import GPT, next_token_loss, preset
        dist.init_process_group("gloo")
        model = GPT(preset("toy"))
        LINES
        tokens = torch.arange(8)[None] + dist.get_rank()
        for step in range(9):
            loss = engine.training_step(tokens, tokens, next_token_loss)
        print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
        dist.barrier()
        dist.destroy_process_group()
    """
    lines = code("adjust_lr_fn", "docs/whole-parameters.md")
    found = losses(tmp_path / "muon.py", textwrap.dedent(text).replace("LINES", lines), 2)
    assert found.keys() == {0, 1} and max(found.values()) < 5.3  # it begins at 5.55


@pytest.mark.thorough
def test_the_table_of_padding_is_what_the_lines_under_it_print():
    script = code("def show", "docs/whole-parameters.md")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    found = re.findall(r"(\d+) ranks: ([\d.]+), ([\d.]+) and ([\d.]+)", ended.stdout)
    assert len(found) == 16, ended.stderr
    page = PAGES["docs/whole-parameters.md"]
    for number in range(4):
        ranks, _, largest, smallest = found[4 * number]
        cells = [room for _, room, _, _ in found[4 * number : 4 * number + 4]]
        assert f"| {ranks} | {' | '.join(cells)} | {largest} and {smallest} million |" in page


@pytest.mark.long
def test_the_script_with_a_hugging_face_model_trains_and_saves(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "my_llama"
    script = code("LlamaForCausalLM(config)", "docs/using-an-engine.md").replace('"my_llama"', repr(str(folder)))
    (tmp_path / "train_llama.py").write_text(script)
    ended = started.on_ranks([str(tmp_path / "train_llama.py")], 2)
    assert [rank.returncode for rank in ended] == [0, 0], ended
    printed = "".join(rank.stdout for rank in ended)
    middle, last = (float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed))
    assert last < middle < 3  # it begins at 5.5
    assert transformers.LlamaForCausalLM.from_pretrained(folder).config.num_hidden_layers == 4


@pytest.mark.thorough
@pytest.mark.parametrize("number", [4, 8])
def test_three_dimensions_train(tmp_path, number):
    script = code("PipelineStage", "docs/groups.md").replace("range(100)", "range(25)")
    found = losses(tmp_path / "three_dimensions.py", script, number)
    assert sorted(found) == [rank for rank in range(number) if rank // (number // 4) % 2], found  # of the last part
    assert len(set(found.values())) == 2 and max(found.values()) < 1, found  # a copy each; they begin at 2.2
