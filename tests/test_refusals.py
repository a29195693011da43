"""A mistake on the command line is one line in every command, before anything is written or any rank starts."""

import re
import tomllib
from pathlib import Path

import pytest
from typed_commands import typed

# {what is typed behind ./launch.sh: what is said}. "..." stands for any words, {files} for a folder with some files.
TABLE = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())
ROWS = TABLE["refused"].items()


@pytest.mark.parametrize("line, said", ROWS, ids=[line for line, _ in ROWS])
def test_a_mistake_is_answered_in_one_line(line, said, tmp_path):
    files = {"wrong.json": b'{"something": "else"}', "empty.py": b"", "latin.py": b"# \xe9\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found, printed, mistake = typed(line.format(files=tmp_path))
    assert found == 2 and printed == "", mistake
    (last,) = mistake.splitlines()
    assert re.search(".*".join(map(re.escape, said.format(files=tmp_path).split(" ... "))), last), last
    assert {path.name for path in tmp_path.rglob("*")} == {*files}, "nothing was written"
