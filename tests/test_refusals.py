"""A mistake on the command line is one line in every command, before anything is written or any rank starts."""

import pytest
from typed_commands import typed

# What is typed after ./launch.sh, and parts of the message, in their order. {files} is a folder with some files.
MISTAKES = [
    # launch.sh itself
    ("''", "no command ''"),
    ("zero4", "'zero4': did you mean zero", "There are: zero1, zero2"),
    ("memroy", "did you mean memory?"),
    ("zero1 0", "1 to 999, got '0'"),
    ("zero1 two", "1 to 999, got 'two'"),
    ("NNODES=2 zero1 2", "RDZV_ENDPOINT"),
    ("NNODES=2 RDZV_ENDPOINT=localhost:29400 zero1 2", "NODE_RANK"),
    ("NNODES=2 RDZV_ENDPOINT=localhost:29400 NODE_RANK=2 zero1 2", "got '2'"),
    ("NNODES=2 check zero1", "check runs on one machine: unset NNODES"),
    ("ZERO_TIMEOUT=soon zero1 2", "'soon'"),
    ("ZERO_TIMEOUT=9999999 zero1 2", "'9999999'"),
    ("OMP_NUM_THREADS=x zero1 2", "OMP_NUM_THREADS", "1 or more, got 'x'"),
    ("train", "STAGE is missing, one of: zero1, zero2, zero3"),
    ("exercise", "NAME is missing, one of: zero1, "),
    ("check", "NAME is missing, one of: zero1, "),
    ("train zero4", "'zero4'"),
    ("train zero3 two", "'two'"),
    ("NNODES=1:2 train zero3", "RDZV_ENDPOINT"),
    # Unknown options, and options that would be ignored
    ("train zero1 --batch 8", "no option --batch", "--help lists"),
    ("plan --engine zero3", "did you mean --engines?"),
    ("bench --profil zero3", "no option --profil "),
    ("compare --dtpye bf16", "did you mean --dtype?"),
    ("bench --host --engines ddp", "--engines does nothing beside --host"),
    ("bench --ratios README.md --json x", "--json does nothing beside --ratios"),
    ("memory 64 --up-to 4", "--up-to 4 chooses the numbers of ranks"),
    ("compare --slow-rank 1:0.1 --timed-steps 0", "--timed-steps 0 leaves none"),
    ("docs --check --out x", "--out does nothing beside --check"),
    ("plan --sweep prefetch --out /proc/z", "--out '/proc/z' must be a folder for the figures: "),
    ("plan --out plans", "--out does nothing without --sweep"),
    ("zero1 -1", "unrecognized arguments: -1"),
    ("zero2 --bucket-mb -1", "--bucket-mb", "-1"),
    ("zero1 --lr=nan", "--lr", "nan"),
    ("compare --lr=-1", "--lr", "-1"),
    ("train zero1 --lr=inf", "--lr", "inf"),
    ("zero2 --preset gigantic", "'gigantic'", "tiny"),
    ("zero1 --batch 3 --accumulate 2", "--accumulate 2", "3"),
    ("zero3 --prefetch -1", "--prefetch", "-1"),
    ("zero3 --data /nowhere/text", "--data: no such file: /nowhere/text"),
    # The referee
    ("compare --engines zero9", "'zero9': did you mean zero", "zero_redundancy_optimizer"),
    ("compare --engines ,", "--engines is empty"),
    ("compare --steps 0", "--steps", "0"),
    ("compare --seq 4096", "4096", "tiny"),
    ("compare --json /nowhere/out.json", "/nowhere/out.json': No such file"),
    ("compare --json {files}", "cannot write --json '{files}': Is a directory"),
    ("compare --backend mpi", "mpi"),
    ("compare --data /etc", "--data: no such file: /etc"),
    ("compare --engine-file README.md", "ends in .py", "README.md"),
    ("docs --figure losses --from nope.json", "--from: no such file: nope.json"),
    ("report README.md", "README.md' cannot be used: File exists"),
    ("report {files}", "{files}' is not empty"),
    ("check zero1 --file /etc/passwd", "FILE.py, got /etc/passwd"),
    ("compare --accumulate 3", "--batch must be a multiple of --accumulate 3, but it is 4"),
    ("compare 2 --slow-rank=1", "--slow-rank", "1"),
    ("compare 2 --slow-rank=1:-1", "--slow-rank", "1:-1"),
    ("compare 2 --slow-rank=1:nan", "--slow-rank", "1:nan"),
    ("compare 2 --slow-rank=-1:0.1", "--slow-rank", "-1:0.1"),
    ("compare 2 --slow-rank=2:0.1", "--slow-rank 2: the ranks are 0 to 1"),
    # Training runs
    ("train zero1 --steps 0", "--steps", "0"),
    ("train zero1 --save-every 0", "--save-every"),
    ("train zero1 --preset 7B", "no preset '7B': did you mean 7b"),
    ("train zero1 --preset 13b", "no preset '13b': did you mean 1b? There are:", "70b"),
    ("train zero1 4 --global-batch 3", "--global-batch 3", "4 rank(s) need 4 or more"),
    ("train zero1 --folder /proc/runs", "/proc/runs"),
    # Measuring
    ("bench --sweeps x", "'x'", "bucket size"),
    ("bench --sweeps --host", "not allowed with"),
    ("bench --width 10 --heads 4", "got width 10, heads 4"),
    ("bench --layers 0", "got 0"),
    ("bench --vocab 255", "--vocab: must be a whole number, 256 or more"),
    ("bench --engines zero4", "zero4"),
    ("bench --host zero9", "zero9"),
    ("memory --preset 8b", "'8b'", "70b"),
    ("memory --dtype fp8", "'fp8'", "fp32', 'bf16'"),
    ("memory 0", "N must be 1 to 1,000,000 ranks, got 0"),
    ("memory --up-to 0", "--up-to", "0"),
    ("memory --seq 4096", "4096", "2048"),
    ("memory --engines zero4", "'zero4'", "zero3"),
    ("memory --device tpu", "'tpu'", "fake', 'cuda"),
    ("memory --json /nowhere/x.json", "/nowhere/x.json"),
    ("memory --json /", "'/'"),
    ("docs --figure pie", "no figure 'pie'; there are: stages, memory"),
    ("docs --from {files}/wrong.json", "--from does nothing without --figure"),
    ("docs --figure losses --from /nowhere.json", "/nowhere.json"),
    ("docs --figure memory --from {files}/wrong.json --out {files}", "figure 'memory' cannot be drawn from"),
    ("docs --figure scaling --from {files}/wrong.json --out {files}", "figure 'scaling' cannot be drawn from"),
    ("report {files}/new --fast", "--fast"),
    ("report {files}/wrong.json", "{files}/wrong.json"),
    ("conform zero9", "zero9"),
    ("bench --ratios README.md", "README.md is no report"),
    ("bench --ratios {files}/wrong.json", "{files}/wrong.json is no report"),
    # The commands for learning
    ("bug 0", "'0'", "1 to"),
    ("bug -1", "'-1'", "1 to"),
    ("bug --answer", "number of a bug, 1 to"),
    ("bug 3 1", "N must be 2 to 16 ranks, got 1"),
    ("articles --only none", "matches none"),
    ("articles --json /", "cannot write"),
    ("exercise zero1 --hints 3", "--hints: invalid choice: 3 (choose from 0, 1, 2)"),
    (
        "exercise zero9",
        "NAME: invalid choice: 'zero9' (choose from 'zero1', 'zero1_2psi', 'zero2', 'zero3', 'clip_gradients'",
    ),
    ("check zero2 1", "N must be 2 or more", "got 1"),
    ("check zero2 2 --seconds 0", "--seconds"),
    ("check zero2 --file nowhere.py", "there is no nowhere.py"),
]


@pytest.mark.parametrize("line, parts", [(line, parts) for line, *parts in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_one_line(line, parts, tmp_path):
    files = {"wrong.json": b'{"something": "else"}', "empty.py": b"", "latin.py": b"# \xe9\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    status, printed, mistake = typed(line.format(files=tmp_path))
    assert status == 2 and printed == "", mistake
    (message,) = mistake.splitlines()
    position = 0
    for part in parts:
        position = message.find(part.format(files=tmp_path), position)
        assert position >= 0, f"no {part!r} in {message!r}"
    assert {path.name for path in tmp_path.rglob("*")} == {*files}, "something was written"
