"""A mistake on the command line is one line in every command, before anything is written or any rank starts."""

import pytest
from typed_commands import mistake

# What is typed after ./launch.sh, and a part of the message: a row for each rule that a command has of its own. That
# every command refuses an unknown option is in test_launch.py. {files} is a folder with some files.
MISTAKES = {
    "zero4": "'zero4': did you mean zero",
    "NNODES=2 zero1 2": "RDZV_ENDPOINT",
    "NNODES=2 check zero1": "check runs on one machine: unset NNODES",
    "ZERO_TIMEOUT=soon zero1 2": "'soon'",
    "zero1 0": "1 to 999, got '0'",
    "train zero1 --lr=nan": "nan",
    "train": "STAGE is missing, one of: zero1, zero2, zero3",
    "train zero1 --batch 8": "no option --batch",
    "train zero1 4 --global-batch 3": "4 rank(s) need 4 or more",
    "train zero1 --folder /proc/runs": "/proc/runs",
    "compare --engines ,": "--engines is empty",
    "compare --engines zero9": "'zero9': did you mean zero",
    "compare --seq 4096": "4096",
    "compare --accumulate 3": "--batch must be a multiple of --accumulate 3, but it is 4",
    "compare --json {files}": "cannot write --json '{files}': Is a directory",
    "train zero1 --data /etc": "--data: no such file: /etc",
    "compare --engine-file README.md": "ends in .py",
    "compare 2 --slow-rank=2:0.1": "--slow-rank 2: the ranks are 0 to 1",
    "compare --slow-rank 1:0.1 --timed-steps 0": "--timed-steps 0 leaves none",
    "NNODES=2 compare --breakdown": "--breakdown compares the clocks of the ranks",
    "bench --host --preset toy": "--preset does nothing beside --host",
    "bench --sweeps colours": "no sweep has 'colours' in its name",
    "memory 0": "N must be 1 to 1,000,000 ranks, got 0",
    "memory --preset 8b": "'8b'",
    "memory 64 --up-to 4": "--up-to 4 chooses the numbers of ranks",
    "report {files}": "{files}' is not empty",
    "conform zero9": "no engine 'zero9': did you mean zero",
    "conform fsdp1": "no engine 'fsdp1'",
    "conform missing.py": "no such file: missing.py",
    "conform 9": "N must be 1 to 8 ranks, got 9",
    "bug 0": "NUMBER: invalid choice: 0 (choose from 1, 2,",
    "bug 3 1": "N: invalid choice: 1 (choose from 2, 3,",
    "exercise": "NAME is missing, one of: zero1, ",
    "exercise zero1 --hints 3": "--hints: invalid choice: 3 (choose from 0, 1, 2)",
    "check zero2 1": "N must be 2 or more",
    "check zero2 --file nowhere.py": "there is no nowhere.py",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, tmp_path):
    (tmp_path / "wrong.json").write_text('{"something": "else"}')
    assert MISTAKES[line].format(files=tmp_path) in mistake(line.format(files=tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["wrong.json"], "something was written"
