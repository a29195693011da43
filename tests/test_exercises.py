"""The exercises: every blank fails at its own step, right solutions pass, and wrong ones do not."""

import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_launch import launch

from harness import check, check_ranks, check_steps, exercise
from harness.exercise import EXERCISES, ROOT, generate

# The chapter's step 3 of ZeRO-1 sends 2Ψ; this is the exercise's own, and another that works in place.
REDUCE_SCATTER = """\
        works = []
        for bucket in self.trained:
            shard = bucket.flat_gradient.new_empty(bucket.shard_numel)
            work = dist.reduce_scatter_single(shard, bucket.flat_gradient, group=self.group, async_op=True)
            works.append((work, shard))
        for bucket, (work, shard) in zip(self.trained, works):
            loop.wait(work, "reduce-scatter", bucket)
            shard /= self.world_size
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
                piece.grad = gradient.to(piece.dtype)
"""
IN_PLACE = """\
        for bucket in self.trained:
            shard = bucket.flat_gradient[bucket.start : bucket.start + bucket.shard_numel]
            dist.reduce_scatter_single(shard, bucket.flat_gradient.clone(), group=self.group)
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
                piece.grad = (gradient / self.world_size).to(piece.dtype)
"""


def fill(text: str, bodies: dict[str, str]) -> str:
    """`text` with the blanks of these functions filled in."""
    for where, body in bodies.items():
        node = exercise.find(ast.parse(text), where)
        blank = next(n for n in ast.walk(node) if isinstance(n, ast.Raise) and "NotImplementedError" in ast.unparse(n))
        lines = text.split("\n")
        lines[blank.lineno - 1 : blank.end_lineno] = body.rstrip("\n").split("\n")
        text = "\n".join(lines)
    return text


def solution(name: str, **bodies: str) -> str:
    """The reference, with these methods written otherwise."""
    names = {
        where.replace(".", "_of_") if "Reduction" in where else where.partition(".")[2]: where for where in wheres(name)
    }
    bodies = {names[short]: body for short, body in bodies.items()}
    if name == "zero1_2psi":
        bodies.setdefault("ZeRO1._sync_gradients", REDUCE_SCATTER)
    return fill(generate(name, tuple(bodies)), bodies)


def wheres(name: str) -> list[str]:
    return [blank.where for blank in EXERCISES[name].blanks]


def examine(pool, folder: Path, name: str, text: str) -> check.Report:
    """The check's verdicts and its report, on ranks that are there already."""
    file = folder / f"{name}.py"
    file.write_text(text)
    pool.run(check_ranks.examine, name=name, file=str(file), folder=str(folder), seconds=30)
    report = check.Report(check_steps.checks_of(name), str(folder), pool.world_size, file.name, text)
    report.read()
    assert report.over
    return report


# Making them.


@pytest.mark.parametrize("name", EXERCISES)
def test_only_the_blanks_are_taken_out(name):
    reference, text = (ROOT / EXERCISES[name].source).read_text(), generate(name)
    tree = ast.parse(text)
    for blank in EXERCISES[name].blanks:
        inside = ast.unparse(exercise.find(tree, blank.where))
        assert inside.count("raise NotImplementedError(") == 1 and repr(blank.task)[1:-1] in inside, blank.where
        assert (
            ast.get_docstring(exercise.find(tree, blank.where)) or blank.where.endswith("__init__") or "_pre" in inside
        )
        assert re.search(r"about (as many lines|\d+ lines)", text[text.index(blank.hint[:20]) :]), blank.where
    assert [task for _, task in sorted(check.to_write(text), key=lambda found: found[1])] == sorted(
        blank.task for blank in EXERCISES[name].blanks
    )
    kept = [line for line in difflib.ndiff(reference.split("\n"), text.split("\n")) if line[0] == "+"]
    code = [line for line in kept if line[2:].strip() and not line[2:].strip().startswith("#")]
    assert sum("raise NotImplementedError(" in line for line in code) == len(EXERCISES[name].blanks)
    assert max(map(len, text.split("\n"))) <= 125


def test_with_no_blank_open_it_is_the_chapter():
    for name in ("zero1", "zero3"):
        assert generate(name, ()) == (ROOT / f"{name}.py").read_text()
    added = [
        line for line in difflib.ndiff((ROOT / "zero2.py").read_text().split("\n"), generate("zero2", ()).split("\n"))
    ]
    assert [line for line in added if line[0] == "-"] == ["-     clip_grad_norm_ = loop.clip_grad_norm_"]


def test_a_method_that_is_gone_is_an_error(monkeypatch):
    whole = EXERCISES["zero2"]
    for changes in ({"where": "ZeRO2._reduce"}, {"first": "with something("}, {"first": "", "last": "if bucket"}):
        broken = replace(whole, blanks=(replace(whole.blanks[2], **changes),))
        monkeypatch.setitem(EXERCISES, "zero2", broken)
        with pytest.raises(LookupError, match=r"change EXERCISES in harness/exercise\.py"):
            generate("zero2")


def test_every_exercise_has_a_check_for_every_blank():
    for name in EXERCISES:
        checks = check_steps.checks_of(name)
        assert [c.blank.where for c in checks if c.blank] == wheres(name)
        assert len(checks) == len(wheres(name)) + 2


# Checking them.


@pytest.mark.parametrize(("name", "where"), [(name, where) for name in EXERCISES for where in wheres(name)])
def test_every_blank_fails_at_its_own_step(ranks, tmp_path, capsys, name, where):
    text = generate(name, [where])
    if name == "zero1_2psi":
        text = generate(name)
    report = examine(ranks(3), tmp_path, name, text)
    *before, last = report.verdicts
    place = wheres(name).index(where)
    assert [verdict["status"] for verdict in before] == ["passed"] * place
    (line,) = (line for line, task in check.to_write(text) if task == EXERCISES[name].blanks[place].task)
    assert last["status"] == "open" and last["task"] == EXERCISES[name].blanks[place].task and last["line"] == line
    assert f"not written yet: {last['task']}, see line {line} of {name}.py" in " ".join(capsys.readouterr().out.split())


RIGHT = {
    "the reference, zero1": ("zero1", {}),
    "the reference, zero2": ("zero2", {}),
    "the reference, zero3": ("zero3", {}),
    "reduce-scatter": ("zero1_2psi", {}),
    "reduce-scatter into a part of the gradients' buffer": ("zero1_2psi", {"_sync_gradients": IN_PLACE}),
    "zero1 with synchronous collectives": (
        "zero1",
        {
            "_sync_gradients": """\
        for bucket in self.trained:
            dist.all_reduce(bucket.flat_gradient, group=self.group)
            mine = bucket.flat_gradient.div_(dist.get_world_size(self.group)).chunk(self.world_size)[self.rank]
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(mine)):
                piece.grad = gradient
""",
            "step": """\
        self._sync_gradients()
        self.optimizer.step()
        self._sync_params(self.trained)
""",
            "_sync_params": """\
        for bucket in buckets:
            dist.all_gather_single(bucket.flat, bucket.shard.clone(), group=self.group)
""",
            "cut": """\
        found, end = [], self.start + self.shard_numel
        for i in range(len(self.params)):
            a, b = self.offsets[i], self.offsets[i] + self.params[i].numel()
            if b > self.start and a < end:
                found.append((i, shard[max(a - self.start, 0) : min(b, end) - self.start]))
        return found
""",
        },
    ),
    "zero2 one bucket at a time": (
        "zero2",
        {
            "Reduction_of___init__": """\
        whole = torch.cat([bucket.flat.new_zeros(bucket.numel, dtype=bucket.reduce_dtype)])
        for i, param in enumerate(bucket.params):
            if param.grad is not None:
                whole[bucket.offsets[i] :][: param.numel()] = param.grad.flatten()
            if param in bucket.kept:
                whole[bucket.offsets[i] :][: param.numel()] += bucket.kept.pop(param).flatten()
            param.grad = None
        self.mean = whole.new_empty(bucket.shard_numel)
        dist.reduce_scatter_single(self.mean, whole, group=group)
""",
            "Reduction_of_finish": """\
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.mean)):
            piece.grad = gradient / world_size + (0 if piece.grad is None else piece.grad)
""",
            "_reduce_bucket": """\
        reduction = Reduction(bucket, self.group)
        reduction.finish(self.world_size)
""",
        },
    ),
}


@pytest.mark.parametrize("which", RIGHT)
def test_right_solutions_pass(ranks, tmp_path, which):
    name, bodies = RIGHT[which]
    report = examine(ranks(3), tmp_path, name, solution(name, **bodies))
    assert [verdict["status"] for verdict in report.verdicts] == ["passed"] * len(report.checks)


DISGUISED = '''
from torch.nn.parallel import DistributedDataParallel


class ZeRO1:
    """Right losses and nothing cut: plain AdamW under DDP, behind an engine's face."""

    def __init__(self, model, optimizer_cls, *, group=None, bucket_mb=25.0):
        self.model, self.group, self.trained = model, group, []
        self.buckets = []
        self.ddp = DistributedDataParallel(model)
        self.optimizer = optimizer_cls(list(model.parameters()))

    def __call__(self, *inputs):
        return self.ddp(*inputs)

    def training_step(self, inputs, targets, loss_fn):
        loss = loss_fn(self(inputs), targets)
        loss.backward()
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def full_state_dict(self):
        return self.model.state_dict()

    def _sync_gradients(self): ...

    def _sync_params(self, buckets): ...


def main'''

KEPT = """\
        loop.wait(self.work, "reduce-scatter", self.bucket)
        self.bucket.whole = self.flat
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.shard / world_size)):
            piece.grad = gradient if piece.grad is None else piece.grad.add_(gradient)
"""
AT_THE_END = """\
        bucket.missing.discard(param)
        if not self._waiting:
            self._waiting = list(self.trained)
        if not any(other.missing for other in self._waiting):
            while self._waiting:
                self._reduce_bucket(self._waiting.pop(0))
"""
SUMMED = REDUCE_SCATTER.replace("            shard /= self.world_size\n", "")
ALL_REDUCED = """\
        self.flat = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        for param, view in zip(bucket.params, bucket.views(self.flat)):
            view.copy_(param.grad)
            param.grad = None
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)
        self.shard = self.flat[bucket.start : bucket.start + bucket.shard_numel]
"""
BROADCAST = """\
        for bucket in buckets:
            for rank, part in enumerate(bucket.flat.chunk(self.world_size)):
                dist.broadcast(part, group_src=rank, group=self.group)
            dist.all_gather_single(bucket.flat, bucket.shard, group=self.group)
"""
DATA = """\
        if unit.whole:
            self._wait_for_unit(unit)
            for bucket in unit.buckets:
                bucket.flat = torch.empty_like(bucket.flat)
                for param, view in zip(bucket.params, bucket.views(bucket.flat)):
                    param.data = view
                bucket.flat.untyped_storage().resize_(0)
            guard.close(unit.params)
            unit.whole = False
"""
NEVER_FREED = """\
        if any(b.missing for b in unit.trained):
            return
        self._reduce_unit(unit)
"""
FROZEN_FREED = """\
        if any(b.missing for b in unit.trained):
            return
        self._reshard_unit(unit)
        if not self.find_unused:
            self._reduce_unit(unit)
"""
HIDDEN = """\
        loop.wait(self.work, "reduce-scatter", self.bucket)
        Reduction.all = [*getattr(Reduction, "all", []), self.flat]
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.shard / world_size)):
            piece.grad = gradient if piece.grad is None else piece.grad.add_(gradient)
"""
LOCAL_NORM = """\
        self._sync_gradients()
        pieces = [piece for bucket in self.trained for _, piece in bucket.pieces]
        return torch.nn.utils.clip_grad_norm_(pieces, max_norm, norm_type)
"""
ALL_AT_ONCE = """\
        for following in self.units:
            self._gather_unit(following)
"""
NOT_AHEAD = """\
        self._gather_unit(unit)
        self._wait_for_unit(unit)
"""
UNALIGNED = """\
        self.offsets, end = [], 0
        for param in self.params:
            self.offsets.append(end)
            end += param.numel()
        self.shard_numel = max(1, -(-end // world_size))
        self.numel = self.shard_numel * world_size
        self.start = rank * self.shard_numel
"""
NOT_ALL = UNALIGNED.replace("-(-end // world_size)", "end // world_size")
WRONG = {
    "padding forgotten": ("zero1", {"__init__": NOT_ALL}, "Step 0: lay", "offsets and shard_numel"),
    "gradients not averaged": ("zero1_2psi", {"_sync_gradients": SUMMED}, "Step 3", "summed, not averaged"),
    "2Ψ wanted, 3Ψ sent": ("zero1_2psi", None, "Step 3", "found     all-reduce"),
    "weights sent twice": ("zero1", {"_sync_params": BROADCAST}, "Step 5", "all-gather, then broadcast"),
    "whole gradients kept": ("zero2", {"Reduction_of_finish": KEPT}, "Step 3: receive", "alive after finish"),
    "whole gradients kept where nobody looks": ("zero2", {"Reduction_of_finish": HIDDEN}, "Step 3: rec", "alive after"),
    "an all-reduce in place": ("zero2", {"Reduction_of___init__": ALL_REDUCED}, "Step 3: send", "found     all-reduce"),
    "gradients kept to the end of backward": ("zero2", {"_on_gradient": AT_THE_END}, "Step 3: from", "worst moment"),
    "the norm of this rank's shard": ("zero2", {"clip_grad_norm_": LOCAL_NORM}, "Step 3: clip", "the norm that is"),
    "freed by .data": ("zero3", {"_reshard_unit": DATA}, "Step 5: free", "alive after freeing"),
    "everything gathered at once": ("zero3", {"_pre_forward": ALL_AT_ONCE}, "Step 1", "order of events"),
    "no prefetch in backward": ("zero3", {"_pre_backward": NOT_AHEAD}, "Step 2", "order of events"),
    "a frozen weight freed before its backward": ("zero3", {"_on_gradient": FROZEN_FREED}, "Step 3", ""),
    "not freed in backward": ("zero3", {"_on_gradient": NEVER_FREED}, "Step 3", "worst moment"),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_solutions_do_not_pass(ranks, tmp_path, capsys, which):
    name, bodies, step, said = WRONG[which]
    text = generate("zero1", ()) if bodies is None else solution(name, **bodies)
    report = examine(ranks(3), tmp_path, name, text)
    assert report.verdicts[-1]["status"] in ("failed", "error")
    assert report.checks[len(report.verdicts) - 1].title.startswith(step), report.verdicts
    assert said in capsys.readouterr().out


def test_unsharded_adamw_under_ddp_fails_on_bytes_and_order(ranks, tmp_path, capsys):
    """It has nothing of a stage's inside for the steps to look at: so the checks of all steps together are asked."""
    ranks(3).run(_all_steps_of_the_impostor, folder=str(tmp_path))
    said = "\n".join(file.read_text() for file in tmp_path.glob("findings.*"))
    assert "optimizer held in step 4" in said and "collectives in a training step" in said, said
    text = re.sub(
        r"\nclass ZeRO1:.*?\ndef main", DISGUISED.replace("\\", "\\\\"), generate("zero1", ()), flags=re.DOTALL
    )
    report = examine(ranks(3), tmp_path, "zero1", text)
    assert report.verdicts[-1]["status"] != "passed"


def _all_steps_of_the_impostor(folder: str) -> None:
    import torch
    import torch.distributed as dist

    text = re.sub(r"\nclass ZeRO1:.*?\ndef main", DISGUISED, generate("zero1", ()), flags=re.DOTALL)
    file = Path(folder, f"impostor{dist.get_rank()}.py")
    file.write_text(text)
    module = check_ranks.load("zero1", str(file))
    sheet = check_steps.Sheet("zero1", module, torch.device("cpu"))
    for each in check_steps.checks_of("zero1")[-2:]:
        each.look(sheet)
    Path(folder, f"findings.{dist.get_rank()}").write_text(str(sheet.findings))


# As a student runs it.


def test_the_reference_is_not_taken_for_the_students_file(tmp_path):
    for text, said in (
        ("from zero2 import *\n", "imports zero2.py, the reference"),
        (generate("zero2", ()).replace("def _on_gradient", "def other"), "no ZeRO2._on_gradient in it"),
        ((ROOT / "zero2.py").read_text(), "clip_grad_norm_ comes from"),
    ):
        file = tmp_path / "zero2.py"
        file.write_text(text)
        sys.modules["zero2"], before = None, sys.modules.get("zero2")
        try:
            with pytest.raises(check_ranks.Broken, match=said):
                check_ranks.load("zero2", str(file))
        finally:
            del sys.modules["zero2"]
            if before is not None:
                sys.modules["zero2"] = before


def test_a_deadlock_names_what_every_rank_waits_in(tmp_path):
    body = """\
        self._sync_gradients()
        if self.rank == 0:
            dist.barrier()
        self.optimizer.step()
        self._sync_params(self.trained)
"""
    file = tmp_path / "zero1.py"
    file.write_text(solution("zero1", step=body))
    result = launch("check", "zero1", "2", "--file", str(file), "--seconds", "6", "--device", "cpu")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "HANGS     Step 4" in result.stdout and result.stdout.count("passed  ") == 3
    line = file.read_text().split("\n").index("            dist.barrier()") + 1
    assert f"rank 0 waits in barrier, issued in line {line}" in result.stdout, result.stdout
    assert "Warning" not in result.stderr and not result.stderr.strip(), result.stderr


def test_from_the_first_line_to_passed(tmp_path):
    """The commands as a student types them, in a copy of the folder, so that nobody's exercises are touched."""
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("launch.sh", "zero1.py", "zero2.py", "zero3.py"):
        shutil.copy(ROOT / part, tmp_path / part)

    def run(*arguments):
        result = subprocess.run(
            [str(tmp_path / "launch.sh"), *arguments],
            env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Warning" not in result.stderr and "Traceback" not in result.stderr, result.stderr
        return result.returncode, result.stdout, result.stderr

    assert run("exercise", "zero1_2psi")[:2] == (0, exercise.told("zero1_2psi", generate("zero1_2psi")) + "\n")
    file = tmp_path / "exercises" / "zero1_2psi.py"
    assert file.read_text() == generate("zero1_2psi")
    file.write_text(solution("zero1_2psi"))
    status, said, mistake = run("check", "zero1_2psi", "2", "--device", "cpu")
    assert status == 0 and "3 of 3 passed: exercises/zero1_2psi.py is right." in said and not mistake, said + mistake


def test_an_edited_file_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.setattr(exercise, "FOLDER", tmp_path / "exercises")
    shutil.copy(ROOT / "zero3.py", tmp_path)
    file = tmp_path / "exercises" / "zero3.py"
    exercise.main(["zero3"])
    exercise.main(["zero3"])  # as it was written
    text = file.read_text()
    file.write_text(text + "# mine\n")
    with pytest.raises(SystemExit) as leaving:
        exercise.main(["zero3"])
    assert leaving.value.code == 2 and file.read_text() == text + "# mine\n"
    assert "exercises/zero3.py is there and was edited; with --force" in capsys.readouterr().err
    exercise.main(["zero3", "--force"])
    assert file.read_text() == text


def test_a_syntax_error_is_one_line(tmp_path, capsys):
    file = tmp_path / "zero1.py"
    file.write_text(generate("zero1").replace("def main()", "def main("))
    with pytest.raises(SystemExit) as leaving:
        check.main(["zero1", "--file", str(file)])
    mistake = capsys.readouterr().err
    line = file.read_text().split("\n").index("def main( -> None:") + 1
    assert leaving.value.code == 1 and f"zero1.py, line {line}: " in mistake and mistake.count("\n") == 1, mistake


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("exercise", "zero9"), "there are: zero1, zero1_2psi, zero2, zero3; not 'zero9'"),
        (("check", "zero2", "1"), "N must be 2 or more"),
        (("check", "zero2", "two"), "got 'two'"),
        (
            ("check", "zero2", "--device", "tpu", "--file", str(ROOT / "zero2.py")),
            "--device must be auto, cpu or cuda, got 'tpu'",
        ),
        (("check", "zero2", "--file", "nowhere.py"), "there is no nowhere.py"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as leaving:
        {"exercise": exercise, "check": check}[arguments[0]].main(list(arguments[1:]))
    mistake = capsys.readouterr().err
    assert leaving.value.code == 2 and said in mistake and mistake.count("\n") == 1
