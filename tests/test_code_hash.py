"""The hash of the measured code: it changes with the code, and with nothing else."""

import json

import pytest

from zerolab.run import code
from zerolab.teach import docs

A = '''"""A docstring."""
import b  # a comment


class C:
    """One."""

    def f(self):
        if b is None:
            raise ValueError("a message")
        return b.g()
'''
FILES = {
    "a.py": A,
    "b.py": "def g():\n    from package import inner\n\n    return inner.VALUE\n",
    "package/__init__.py": "",
    "package/inner.py": "VALUE = 1\n",
    "other.py": "OTHER = 1\n",
}


@pytest.mark.parametrize(
    "file, old, new, changes",
    [
        ("a.py", "A docstring.", "Another one.", False),
        ("a.py", "  # a comment", "", False),
        ("a.py", "a message", "another", False),
        ("a.py", "b is None", "b is not None", True),
        ("b.py", "inner.VALUE", "(\n        inner.VALUE\n    )", False),
        ("package/inner.py", "1", "2", True),
        ("other.py", "1", "2", False),
    ],
)
def test_the_hash_changes_only_with_the_code_that_is_imported(tmp_path, file, old, new, changes):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = code.measured_hash(("a",), tmp_path)
    assert old in FILES[file]
    (tmp_path / file).write_text(FILES[file].replace(old, new))
    assert (code.measured_hash(("a",), tmp_path) != before) == changes


def test_chapters_engines_and_the_model_are_measured():
    found = {str(path.relative_to(code.ROOT)) for path in code.files_of(code.MEASURED, code.ROOT)}
    assert {"zero1.py", "zero2.py", "zero3.py", "zerolab/engine/zero3.py", "zerolab/run/model.py"} <= found


def test_results_of_older_code_are_listed_with_their_commit_and_command(tmp_path, monkeypatch):
    now = code.measured_hash()
    for name, measured in {
        "now": {"code": now, "commit": "c1", "command": "one"},
        "older": {"code": "0" * 16, "commit": "c2", "command": "two"},
    }.items():
        (tmp_path / "results" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "results" / "a" / f"{name}.json").write_text(json.dumps(measured))
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (line,) = docs.older_results()
    assert "a/older.json" in line and "c2" in line and "two" in line
