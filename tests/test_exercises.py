"""The exercises: every blank fails at its own step, right solutions pass, and wrong ones do not."""

import ast
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from harness.teach import exercise
from harness.teach.check import ranks as check_ranks
from harness.teach.check import report as check
from harness.teach.check import sheet as check_sheet
from harness.teach.check import steps as check_steps
from harness.teach.exercise import EXERCISES, ROOT, generate

# The chapter's step 3 of ZeRO-1 sends 2Ψ; this is the exercise's own, and another that works in place.
REDUCE_SCATTER = """\
        works = []
        for bucket in self.trained:
            shard = bucket.flat_gradient.new_empty(bucket.shard_numel)
            work = dist.reduce_scatter_single(shard, bucket.flat_gradient, group=self.group, async_op=True)
            works.append((work, shard))
        for bucket, (work, shard) in zip(self.trained, works):
            wait(work, "reduce-scatter", bucket)
            shard /= self.world_size
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
                piece.grad = gradient.to(piece.dtype)
"""
IN_PLACE = """\
        for bucket in self.trained:
            shard = bucket.flat_gradient[bucket.start : bucket.start + bucket.shard_numel]
            dist.reduce_scatter_single(shard, bucket.flat_gradient, group=self.group)
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
                piece.grad = (gradient / self.world_size).to(piece.dtype)
"""


def fill(text: str, bodies: dict[str, str]) -> str:
    """`text` with the blanks of these functions filled in, each as deep as its blank stands."""
    for where, body in bodies.items():
        node = exercise.find(ast.parse(text), where)
        blank = next(n for n in ast.walk(node) if isinstance(n, ast.Raise) and "NotImplementedError" in ast.unparse(n))
        lines = text.split("\n")
        body = textwrap.indent(textwrap.dedent(body).rstrip("\n"), " " * blank.col_offset)
        lines[blank.lineno - 1 : blank.end_lineno] = body.split("\n")
        text = "\n".join(lines)
    return text


def solution(name: str, **bodies: str) -> str:
    """The reference, with these methods written otherwise."""
    names = {
        where.replace(".", "_of_") if "Reduction" in where else where.split(".")[-1]: where for where in wheres(name)
    }
    bodies = {names[short]: body for short, body in bodies.items()}
    if name == "zero1_2psi":
        bodies.setdefault("ZeRO1._reduce_gradients", REDUCE_SCATTER)
    return fill(generate(name, tuple(bodies)), bodies)


def wheres(name: str) -> list[str]:
    return [blank.where for blank in EXERCISES[name].blanks]


def examine(pool, folder: Path, name: str, text: str, first: int = 0) -> check.Report:
    """The check's verdicts from step `first` on and its report, on ranks that are there already."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    file = folder / f"{name}.py"
    file.write_text(text)
    pool.run(check_ranks.examine, name=name, file=str(file), folder=str(folder), seconds=30, first=first)
    report = check.Report(check_steps.checks_of(name), str(folder), pool.world_size, file.name, text)
    report.verdicts = [{"status": "passed"}] * first
    report.read()
    assert report.over
    return report


# Making them.


@pytest.mark.parametrize("name", EXERCISES)
def test_only_the_blanks_are_taken_out(name):
    reference, text = (ROOT / EXERCISES[name].source).read_text(), generate(name)
    tree, whole = ast.parse(text), ast.parse(generate(name, ()))
    for blank in EXERCISES[name].blanks:
        inside = ast.unparse(exercise.find(tree, blank.where))
        assert inside.count("raise NotImplementedError(") == 1 and repr(blank.task)[1:-1] in inside, blank.where
        words = ast.get_docstring(exercise.find(whole, blank.where))
        assert ast.get_docstring(exercise.find(tree, blank.where)) == words, blank.where
        above = text.partition(f'"{blank.task}"')[0].rpartition("STEP")[2]
        assert re.search(r"about (as many lines|1 line;|\d+ lines)", above), blank.where
    assert [task for _, task in sorted(check.to_write(text), key=lambda found: found[1])] == sorted(
        blank.task for blank in EXERCISES[name].blanks
    )
    kept = [line for line in difflib.ndiff(reference.split("\n"), text.split("\n")) if line[0] == "+"]
    code = [line for line in kept if line[2:].strip() and not line[2:].strip().startswith("#")]
    assert sum("raise NotImplementedError(" in line for line in code) == len(EXERCISES[name].blanks)
    assert max(map(len, text.split("\n"))) <= 125


@pytest.mark.parametrize("name", EXERCISES)
def test_hints_come_in_levels(name):
    """At level 0 there are targets alone; a hint more at each level; and `check --hint` gives those that are left."""
    texts = [generate(name, hints=level) for level in (0, 1, 2)]
    for each in check_steps.checks_of(name):
        blank = each.blank
        if blank is None:
            assert each.read in " ".join(check.next_hints(each, texts[0], 1))
            continue
        assert [blank.hints_in(text) for text in texts] == [0, 1, 2] and len({*blank.hints}) == 2
        assert all(text.count(f'NotImplementedError("{blank.task}")') == 1 for text in texts)
        for level, text in enumerate(texts):
            for many in (1, 2):
                said = " ".join(" ".join(check.next_hints(each, text, many)).split())
                given = [hint for hint in blank.hints if " ".join(hint.split()) in said]
                assert given == [*blank.hints[level : level + many]]
                assert (each.read in said) == (level == 2)
    assert max(len(line) for text in texts for line in text.split("\n")) <= 125


@pytest.mark.parametrize("name", EXERCISES)
def test_a_target_names_the_engines_helpers(name):
    """Nobody can guess them, and with `--hints 0` there is nothing else."""
    tree = ast.parse(generate(name, ()))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module.startswith("harness.")]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    for blank in EXERCISES[name].blanks:
        calls = [n for each in exercise.statements(tree, blank) for n in ast.walk(each) if isinstance(n, ast.Call)]
        for first, *rest in (ast.unparse(call.func).split(".") for call in calls):
            if first in known or "placement" in rest:
                words = {"`" + first + "`", (rest or [first])[-1]}
                assert any(word in blank.target for word in words), (blank.where, first, rest)


def test_what_is_to_be_read_is_the_students_file():
    """Where a blank sends to the head of a chapter, the exercise has it too; the chapter itself is the solution."""
    for name, each in EXERCISES.items():
        for blank in each.blanks:
            tops = re.findall(r"at the top of (?!the file)([\w/.]+\.py)", blank.read)
            assert set(tops) <= {f"exercises/{name}.py"} and each.source not in blank.read.split(), blank.read
    head = ast.get_docstring(ast.parse(generate("zero3")))
    assert head.partition("Check it")[0] == ast.get_docstring(ast.parse(generate("zero3", ()))).partition("Run it")[0]
    assert "**Prefetch** means" in head


def test_with_no_blank_open_it_is_the_chapter():
    for name in ("zero1", "zero3", "checkpoint"):
        assert generate(name, ()) == (ROOT / EXERCISES[name].source).read_text()
    # In zero2 a function of another file has become a method, and nothing else has changed.
    (moved,) = (blank for blank in EXERCISES["zero2"].blanks if blank.source)
    chapter, text = (ast.parse(source) for source in ((ROOT / "zero2.py").read_text(), generate("zero2", ())))
    name = moved.where.partition(".")[2]
    assert exercise.find(text, moved.where).args.args[0].arg == "self"
    for tree in (chapter, text):
        (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ZeRO2")
        cls.body = [node for node in cls.body if name not in (getattr(node, "name", None), _target(node))]
    assert _without_imports(chapter) == _without_imports(text)


def _target(node) -> str | None:
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None


def _without_imports(tree: ast.Module) -> list[str]:
    return [ast.dump(node) for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]


# How a blank finds its statements: in a chapter of its own, so that it does not matter what the real ones look like.

CHAPTER = """\
\"\"\"A chapter.\"\"\"

import torch
from harness.engine import extras


class Stage:
    def step(self, units):
        \"\"\"A docstring is no statement.\"\"\"
        self.works, place = [], 0
        with record_function("gather"):
            first = 1
            self.free(first)
        for unit in self.units:
            pass
        if self.ready and unit.missing:
            return
        for unit in reversed(units):
            self.free(unit)
        self.free(None)
        place += 1

    clip = extras.clip
    other = extras.other


def main(): ...
"""


def _found(**options) -> list[str]:
    """The first line of each statement that a blank with these options takes out of `CHAPTER`."""
    blank = exercise.Blank(where="Stage.step", task="Step 1: all", hint="", target="", read="")
    found = exercise.statements(ast.parse(CHAPTER), replace(blank, **options))
    return [ast.unparse(statement).partition("\n")[0] for statement in found]


@pytest.mark.parametrize(
    "options, first, count",
    [
        ({}, "self.works, place = ([], 0)", 7),
        ({"first": ("With", 0)}, "with record_function('gather'):", 6),
        ({"first": ("With", "record_function"), "last": ("With", -1)}, "with record_function('gather'):", 1),
        ({"first": ("Assign", "self.works"), "last": ("Assign", 0)}, "self.works, place = ([], 0)", 1),
        ({"first": ("For", 1)}, "for unit in reversed(units):", 3),
        ({"first": ("For", "self.units"), "last": ("For", "units")}, "for unit in self.units:", 3),
        ({"first": ("If", "unit.missing")}, "if self.ready and unit.missing:", 4),
        ({"first": ("Call", "self.free")}, "self.free(None)", 2),
        ({"first": ("Assign", -1)}, "place += 1", 1),
        ({"inside": ("With", 0)}, "first = 1", 2),
        ({"inside": ("With", 0), "first": ("Call", 0)}, "self.free(first)", 1),
    ],
)
def test_a_blank_is_found_by_structure(options, first, count):
    found = _found(**options)
    assert (found[0], len(found)) == (first, count)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"where": "Stage.move"}, "Stage.move"),
        ({"first": ("With", 1)}, "('With', 1)"),
        ({"first": ("Assign", "self.flat")}, "('Assign', 'self.flat')"),
        ({"first": ("Assign", "place")}, "('Assign', 'place')"),  # there are two
        ({"last": ("Call", "self.gather")}, "('Call', 'self.gather')"),
        ({"inside": ("While", 0)}, "('While', 0)"),
        ({"first": ("For", 1), "last": ("For", 0)}, "('For', 0)"),
        ({"source": "harness/engine/__init__.py"}, "Stage.step"),  # nothing of that name is there
    ],
)
def test_what_is_not_found_is_an_error_with_chapter_function_and_selector(monkeypatch, tmp_path, options, said):
    (tmp_path / "chapter.py").write_text(CHAPTER)
    (tmp_path / "harness/engine").mkdir(parents=True)
    (tmp_path / "harness/engine/__init__.py").write_text("")
    blank = exercise.Blank(where="Stage.step", task="Step 1: all", hint="", target="", read="")
    blank = replace(blank, **options)
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.setitem(EXERCISES, "chapter", exercise.Exercise("chapter.py", "Stage", "", (blank,)))
    with pytest.raises(LookupError) as error:
        generate("chapter")
    message = str(error.value)
    assert "chapter.py" in message and blank.where in message and said in message, message
    assert str(Path(exercise.__file__).relative_to(ROOT)) in message  # where to mend it


ENGINE = """\
import math

import torch

MOST = 3


def half(x):
    return x / 2


def clip(engine, most: float = 1.0):
    \"\"\"Half of the `engine`'s norm.\"\"\"
    half_of = engine.norm  # the engine's
    return min(half(half_of), most, MOST, math.inf), torch.float32
"""
MIXIN = (
    ENGINE.partition("def clip")[0]
    + """\
class Engine:
    @staticmethod
    def nothing(): ...

    @torch.no_grad()
    def clip(self, most: float = 1.0):
        return min(half(self.norm), most, MOST, math.inf), torch.float32
"""
)
INTERFACE = """\
from harness.engine import extras


class Interface:
    clip = extras.clip
"""
BORROWS = [
    ("from harness.engine import extras", "class Stage:", "    clip = extras.clip", ENGINE, "extras"),
    ("from harness.engine import extras as tools", "class Stage:", "    clip = tools.clip", ENGINE, "tools"),
    ("from harness.engine.extras import Engine", "class Stage(Engine):", "    other = 1", MIXIN, "extras"),
    ("from harness.engine.interface import Interface", "class Stage(Interface):", "    other = 1", ENGINE, "extras"),
]


@pytest.mark.parametrize("imports, head, line, engine, module", BORROWS, ids=lambda value: value.partition("\n")[0])
def test_a_borrowed_function_becomes_a_method(monkeypatch, tmp_path, imports, head, line, engine, module):
    """However the class gets it; and what it calls in its own module is still found."""
    chapter = f'"""A chapter."""\n\nimport torch\n{imports}\n\n\n{head}\n    norm = 4.0\n{line}\n    last = 2\n\n\n'
    (tmp_path / "chapter.py").write_text(f"{chapter}def main(): ...\n")
    (tmp_path / "harness/engine").mkdir(parents=True)
    (tmp_path / "harness/engine/extras.py").write_text(engine)
    blank = exercise.Blank("Stage.clip", "Step 3: clip", "", "", "", source="harness/engine/extras.py")
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.setitem(EXERCISES, "chapter", exercise.Exercise("chapter.py", "Stage", "", (blank,)))

    def load(text):
        module_of = types.ModuleType("extras")
        exec(engine, module_of.__dict__)
        package = types.ModuleType("harness.engine")
        package.extras = module_of
        interface, names = types.ModuleType("interface"), {}
        modules = {"": package, ".extras": module_of, ".interface": interface}
        with mock.patch.dict(sys.modules, {f"harness.engine{name}": each for name, each in modules.items()}):
            if "def clip(engine" in engine:
                exec(INTERFACE, interface.__dict__)
            exec(compile(text, "<text>", "exec"), names)
        return names

    names = load(generate("chapter", ()))
    assert "clip" in vars(names["Stage"]) and names["Stage"].clip.__module__ != "extras"
    for most in (1.0, 2.0, 9.0):
        assert names["Stage"]().clip(most) == (min(most, 2.0), torch.float32)
    assert names["Stage"].last == 2 and callable(names["main"])
    blank_method = load(generate("chapter"))["Stage"]
    with pytest.raises(NotImplementedError, match="Step 3: clip"):
        blank_method().clip()
    assert module in names


def test_a_borrowed_function_whose_variable_hides_its_module_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "extras.py").write_text(ENGINE.replace("half_of", "extras"))
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    with pytest.raises(LookupError, match="variable extras"):
        exercise._of_the_chapter(ast.parse("import torch\n"), "extras.py", "clip")


def test_every_exercise_has_a_check_for_every_blank():
    for name in EXERCISES:
        checks = check_steps.checks_of(name)
        assert [c.blank.where for c in checks if c.blank] == wheres(name)
        assert len(checks) == len(wheres(name)) + 2


# Checking them.


@pytest.mark.parametrize("name", EXERCISES)
def test_every_blank_fails_at_its_own_step(ranks, tmp_path, capsys, name):
    for place, where in enumerate(wheres(name)):  # that those before it pass is what the right solutions show
        text = generate(name, None if name == "zero1_2psi" else [where])
        last = examine(ranks(3), tmp_path, name, text, first=place).verdicts[-1]
        (line,) = (line for line, task in check.to_write(text) if task == EXERCISES[name].blanks[place].task)
        assert last["status"] == "open" and last["task"] == EXERCISES[name].blanks[place].task and last["line"] == line
        said = f"not written yet: {last['task']}, see line {line} of {name}.py"
        assert said in " ".join(capsys.readouterr().out.split())


# What a student may write, in words of their own. The slips below are made in these.
SOLVED = {
    "zero1": {
        "__init__": """\
        unit = max(1, 16 // min(self.params[0].element_size(), self.param_dtype.itemsize))
        self.offsets, end = [], 0
        for param in self.params:
            self.offsets.append(end)
            end += (param.numel() + unit - 1) // unit * unit
        units = max(1, (end + world_size * unit - 1) // (world_size * unit))
        self.shard_numel = units * unit
        self.numel = world_size * self.shard_numel
        self.start = rank * self.shard_numel
""",
        "_reduce_gradients": """\
        works = [dist.all_reduce(bucket.flat_gradient, group=self.group, async_op=True) for bucket in self.trained]
        for work, bucket in zip(works, self.trained):
            work.wait()
            bucket.flat_gradient /= self.world_size
            mine = bucket.flat_gradient[bucket.start :][: bucket.shard_numel]
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(mine)):
                piece.grad = gradient.to(piece.dtype)
""",
        "step": """\
        self._reduce_gradients()
        self.optimizer.step()
        gather_parameters(self.trained, self.group)
""",
        "gather_parameters": """\
        works = []
        for bucket in buckets:
            mine = precision.rounded_shard(bucket)
            works.append(dist.all_gather_single(bucket.flat, mine, group=group, async_op=True))
        for work in works:
            work.wait()
""",
    },
    "zero2": {
        "Reduction_of___init__": """\
        self.flat = bucket.flat.new_zeros(bucket.numel, dtype=bucket.reduce_dtype)
        whole = gradients.take(bucket)
        for place, view in enumerate(bucket.views(self.flat)):
            view += whole[place]
        self.mean = self.flat.new_empty(bucket.shard_numel)
        self.work = dist.reduce_scatter_single(self.mean, self.flat, group=group, async_op=True)
""",
        "Reduction_of_finish": """\
        self.work.wait()
        self.flat = None
        self.mean /= world_size
        for (_, piece), (_, part) in zip(self.bucket.pieces, self.bucket.cut(self.mean)):
            part = part.to(piece.dtype)
            piece.grad = part if piece.grad is None else piece.grad + part
""",
        "_send": """\
            self._receive()
            self._in_flight = Reduction(bucket, self.group)
""",
        "gradients_final": """\
        self._complete.add(bucket)
        for first in list(self._turns):
            if first not in self._complete:
                break
            self._complete.discard(first)
            self._turns.rotate(-1)
            self._send(first)
""",
        "clip_grad_norm_": """\
        self._reduce_gradients()
        grads = [piece.grad for bucket in self.trained for _, piece in bucket.pieces if piece.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(self.trained[0].shard)
        everyone = norm.new_empty(self.world_size)
        dist.all_gather_single(everyone, norm.reshape(1), group=self.group)
        total = everyone.norm(norm_type)
        for gradient in grads:
            gradient *= torch.clamp(max_norm / (total + 1e-6), max=1.0)
        return total
""",
    },
    "zero3": {
        "make_units": """\
    if modules is None:
        modules = default_units(model)
    inside, outside = parameters_by_unit(model, list(modules))
    found = []
    for name, module in model.named_modules():
        if inside.get(module):
            found.append(Unit(name, module, inside[module], *layout))
    found.sort(key=lambda unit: list(inside).index(unit.module))
    return found, Unit("root", model, outside, *layout)
""",
        "_free": """\
        if unit.gathered:
            self._wait(unit)
            for bucket in unit.buckets:
                bucket.flat.untyped_storage().resize_(0)
            guard.close(unit.params)
            unit.gathered = False
""",
        "_gather": """\
        for bucket in unit.buckets:
            bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)
            mine = precision.rounded_shard(bucket)
            work = dist.all_gather_single(bucket.flat, mine, group=self.group, async_op=True)
            unit.works.append(work)
        unit.gathered = True
""",
        "before_forward": """\
        for each in [unit, *upcoming]:
            self._gather(each)
        self._wait(unit)
""",
        "before_backward": """\
        for each in [unit, *upcoming]:
            self._gather(each)
        self._wait(unit)
""",
        "after_backward": """\
        self._free(unit)
""",
        "gradients_final": """\
        for bucket in unit.buckets:
            if bucket in unit.trained:
                self._send(bucket)
""",
    },
}


def decorated(name: str) -> str:
    """The reference, with a decorator on each method of the class that the exercise takes out."""
    engine = EXERCISES[name].engine
    methods = "|".join(where.partition(".")[2] for where in wheres(name) if where.startswith(f"{engine}."))
    return re.sub(rf"(    def ({methods})\()", r"    @torch.no_grad()\n\1", generate(name, ()))


RIGHT = {
    **{f"in a student's words, {name}": (name, bodies) for name, bodies in SOLVED.items()},
    "the reference, zero1, with decorators": ("zero1", None),
    "the reference, zero2": ("zero2", {}),
    "the reference, zero3": ("zero3", {}),
    "reduce-scatter": ("zero1_2psi", {}),
    "reduce-scatter into a part of the gradients' buffer": ("zero1_2psi", {"_reduce_gradients": IN_PLACE}),
    "zero1 with synchronous collectives": (
        "zero1",
        {
            "_reduce_gradients": """\
        for bucket in self.trained:
            dist.all_reduce(bucket.flat_gradient, group=self.group)
            mine = bucket.flat_gradient.div_(dist.get_world_size(self.group)).chunk(self.world_size)[self.rank]
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(mine)):
                piece.grad = gradient.to(piece.dtype)
""",
            "step": """\
        self._reduce_gradients()
        self.optimizer.step()
        gather_parameters(self.trained, self.group)
""",
            "gather_parameters": """\
        for bucket in buckets:
            parts = list(bucket.flat.chunk(dist.get_world_size(group)))
            dist.all_gather(parts, precision.rounded_shard(bucket), group=group)
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
    "zero2 in other words": (
        "zero2",
        {
            "Reduction_of___init__": """\
        whole = bucket.flat.new_zeros(bucket.numel, dtype=bucket.reduce_dtype)
        for i, param in enumerate(bucket.params):
            if param.grad is not None:  # what gradients.take does
                whole[bucket.offsets[i] :][: param.numel()] = param.grad.flatten()
            if i in bucket.kept:
                whole[bucket.offsets[i] :][: param.numel()] += bucket.kept.pop(i).flatten()
            param.grad = None
        self.mean = whole.new_empty(bucket.shard_numel)
        parts = list(whole.split(bucket.shard_numel))
        self.sent = dist.reduce_scatter(self.mean, parts, group=group, async_op=True), whole
""",
            "Reduction_of_finish": """\
        self.sent[0].wait()
        del self.sent
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.mean)):
            piece.grad = gradient.to(piece.dtype) / world_size + (0 if piece.grad is None else piece.grad)
""",
            "_send": """\
            if self._in_flight is not None:
                self._in_flight.finish(self.world_size)
                self._in_flight = None
            self._in_flight = Reduction(bucket, self.group)
""",
            "gradients_final": """\
        self._complete |= {bucket}
        while self._turns and self._turns[0] in self._complete:
            self._complete -= {self._turns[0]}
            self._send(self._turns.popleft())
        if not self._turns:
            self._turns.extend(self.trained)
""",
            "clip_grad_norm_": """\
        self._reduce_gradients()
        grads = [piece.grad for bucket in self.trained for _, piece in bucket.pieces if piece.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(self.trained[0].shard)
        everyone = [torch.empty_like(norm) for _ in range(self.world_size)]
        dist.all_gather(everyone, norm, group=self.group)
        norm = torch.stack(everyone).norm(norm_type)
        for gradient in grads:
            gradient *= torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm
""",
        },
    ),
    "zero3 with other loops": (
        "zero3",
        {
            "_free": """\
        if not unit.gathered:
            return
        self._wait(unit)
        unit.gathered = False
        guard.close(unit.params)
        for storage in [bucket.flat.untyped_storage() for bucket in unit.buckets]:
            storage.resize_(0)
""",
            "_gather": """\
        unit.gathered = True
        for bucket in unit.buckets:
            bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)
            parts = list(bucket.flat.split(bucket.shard_numel))
            work = dist.all_gather(parts, precision.rounded_shard(bucket), group=self.group, async_op=True)
            unit.works.append(work)
""",
            "before_forward": """\
        self._gather(unit)
        for i in range(min(self.prefetch, len(upcoming))):
            self._gather(upcoming[i])
        self._wait(unit)
""",
            "before_backward": """\
        self.before_forward(unit, upcoming)
""",
            "after_backward": """\
        if unit.gathered:
            self._free(unit)
""",
            "gradients_final": """\
        self._receive()
        for bucket in unit.trained:
            self._send(bucket)
""",
        },
    ),
}


@pytest.mark.parametrize("which", RIGHT)
def test_right_solutions_pass(ranks, tmp_path, which):
    name, bodies = RIGHT[which]
    text = decorated(name) if bodies is None else solution(name, **bodies)
    report = examine(ranks(3), tmp_path, name, text)
    assert [verdict["status"] for verdict in report.verdicts] == ["passed"] * len(report.checks)


DISGUISED = '''\
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

    def _reduce_gradients(self): ...
'''


def impostor() -> str:
    """The chapter with `DISGUISED` in the place of its class."""
    lines = generate("zero1", ()).split("\n")
    (cls,) = (n for n in ast.parse("\n".join(lines)).body if isinstance(n, ast.ClassDef) and n.name == "ZeRO1")
    lines[cls.lineno - 1 : cls.end_lineno] = DISGUISED.split("\n")
    return "\n".join(lines)


KEPT = """\
        wait(self.work, "reduce-scatter", self.bucket)
        self.bucket.whole = self.flat
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.shard / world_size)):
            piece.grad = gradient.to(piece.dtype) + (0 if piece.grad is None else piece.grad)
"""
AT_THE_END = """\
        self._complete.add(bucket)
        if len(self._complete) == len(self.trained):
            for each in self._turns:
                self._send(each)
            self._complete.clear()
"""
SUMMED = REDUCE_SCATTER.replace("            shard /= self.world_size\n", "")
ALL_REDUCED = """\
        self.flat = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        for gradient, view in zip(gradients.take(bucket), bucket.views(self.flat)):
            view.copy_(gradient)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)
        self.shard = self.flat[bucket.start : bucket.start + bucket.shard_numel]
"""
BROADCAST = """\
        for bucket in buckets:
            for rank, part in enumerate(bucket.flat.chunk(dist.get_world_size(group))):
                dist.broadcast(part, group_src=rank, group=group)
            dist.all_gather_single(bucket.flat, precision.rounded_shard(bucket), group=group)
"""
DATA = """\
        if unit.gathered:
            self._wait(unit)
            for bucket in unit.buckets:
                bucket.flat = torch.empty_like(bucket.flat)
                for param, view in zip(bucket.params, bucket.views(bucket.flat)):
                    param.data = view
                bucket.flat.untyped_storage().resize_(0)
            guard.close(unit.params)
            unit.gathered = False
"""
NEVER_FREED = """\
        pass
"""
REDUCED_BEFORE = """\
        for each in [unit, *upcoming]:
            self._gather(each)
        self._wait(unit)
        for bucket in unit.trained:
            self._send(bucket)
"""
OTHERS_FREED = """\
        for each in [unit, *self.units]:
            self._free(each)
"""
FREED_AGAIN = """\
        for each in [unit, *upcoming]:
            self._gather(each)
        self._wait(unit)
        self._free(unit)
"""
PLAIN_GATHER = """\
        for bucket in unit.buckets:
            bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)
            unit.works.append(dist.all_gather_single(bucket.flat, bucket.shard, group=self.group, async_op=True))
        unit.gathered = True
"""
AS_IN_FORWARD = """\
        if self.reshard_after_forward:
            self._free(unit)
"""
FROZEN_FREED = """\
        self._free(unit)
        for bucket in unit.trained:
            self._send(bucket)
"""
REDUCED_HERE = """\
        self._free(unit)
        for bucket in unit.trained:
            self._send(bucket)
"""
HIDDEN = """\
        wait(self.work, "reduce-scatter", self.bucket)
        Reduction.all = [*getattr(Reduction, "all", []), self.flat]
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.shard / world_size)):
            piece.grad = gradient.to(piece.dtype) + (0 if piece.grad is None else piece.grad)
"""
LOCAL_NORM = """\
        self._reduce_gradients()
        pieces = [piece for bucket in self.trained for _, piece in bucket.pieces]
        return torch.nn.utils.clip_grad_norm_(pieces, max_norm, norm_type)
"""
ALL_AT_ONCE = """\
        self._gather(unit)
        for following in self.units:
            self._gather(following)
        self._wait(unit)
"""
NOT_AHEAD = """\
        self._gather(unit)
        self._wait(unit)
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
SEND_FIRST = """\
            reduction = Reduction(bucket, self.group)
            self._receive()
            self._in_flight = reduction
"""
ANY_ORDER = """\
        self._send(bucket)
"""
OTHER_DATA = """\
        for bucket in unit.buckets:
            for param in bucket.params:
                param.data = bucket.shard
        unit.gathered = False
"""
TRAINED_ONLY = """\
        if unit.gathered:
            self._wait(unit)
            for bucket in unit.trained:
                bucket.flat.untyped_storage().resize_(0)
            guard.close(unit.params)
            unit.gathered = False
"""
AT_ONCE = """\
            self._receive()
            self._in_flight = Reduction(bucket, self.group)
            self._receive()
"""
SYNCHRONOUS = """\
        whole = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        torch._foreach_copy_(bucket.views(whole), gradients.take(bucket))
        self.shard = whole.new_empty(bucket.shard_numel)
        dist.reduce_scatter_single(self.shard, whole, group=group)
"""
RECEIVED_INSIDE = """\
        for bucket in unit.trained:
            self._send(bucket)
            self._receive()
"""
FLAT_NONE = """\
        if unit.gathered:
            self._wait(unit)
            for b in unit.buckets:
                b.flat = None
            guard.close(unit.params)
            unit.gathered = False
"""
EMPTY_DATA = """\
        if unit.gathered:
            self._wait(unit)
            for bucket in unit.buckets:
                for param in bucket.params:
                    param.data = torch.empty(0)
            guard.close(unit.params)
            unit.gathered = False
"""
NO_RETURN = """\
        parts, shard_end = [], self.start + self.shard_numel
        for index, (offset, shape) in enumerate(zip(self.offsets, self.shapes)):
            first, end = max(offset, self.start), min(offset + shape.numel(), shard_end)
            if first < end:
                parts.append((index, shard[first - self.start : end - self.start]))
"""
UPDATED_FIRST = """\
        self.optimizer.step()
        self._reduce_gradients()
        gather_parameters(self.trained, self.group)
"""
OVERWRITTEN = """\
        wait(self.work, "reduce-scatter", self.bucket)
        self.flat = None
        self.shard /= world_size
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.shard)):
            piece.grad = gradient.to(piece.dtype)
"""
EARLY_FREE = """\
        for each in [unit, *upcoming]:
            self._gather(each)
        self._wait(unit)
        for bucket in unit.buckets:
            bucket.flat.untyped_storage().resize_(0)
"""
WAITED = """\
        for bucket in unit.buckets:
            bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)
            mine = precision.rounded_shard(bucket)
            unit.works.append(dist.all_gather_single(bucket.flat, mine, group=self.group, async_op=True))
            unit.works[-1].wait()
        unit.gathered = True
"""
TWICE_HOME = """\
    modules = default_units(model) if modules is None else list(modules)
    names = {module: name for name, module in model.named_modules()}
    units = [Unit(names[module], module, list(module.named_parameters()), *layout) for module in modules]
    return units, Unit("root", model, list(model.named_parameters(recurse=False)), *layout)
"""
WRONG = {
    # The commonest mistakes of beginners, each with words of its own.
    "received at once": ("zero2", {"_send": AT_ONCE}, "Step 3: at most", "when _send returns"),
    "sent synchronously": ("zero2", {"Reduction_of___init__": SYNCHRONOUS}, "Step 3: send", "async_op=True?"),
    "received inside its moment": (
        "zero3",
        {"gradients_final": RECEIVED_INSIDE},
        "Step 3",
        "gradients_final of unit 'blocks.2' returns",
    ),
    "a gather waited for at once": ("zero3", {"_gather": WAITED}, "Step 5: start", "when _gather returns"),
    "flat = None": ("zero3", {"_free": FLAT_NONE}, "Step 5: free", "bucket.flat after freeing a unit"),
    "param.data = empty": ("zero3", {"_free": EMPTY_DATA}, "Step 5: free", "was param.data set?"),
    "a return forgotten": ("zero1", {"cut": NO_RETURN}, "Step 0: cut", "is a return missing?"),
    "updated before reduced": ("zero1", {"step": UPDATED_FIRST}, "Step 4", "updated before reduced"),
    "overwritten": ("zero2", {"Reduction_of_finish": OVERWRITTEN}, "Step 3: receive", "half as much"),
    "ranks' own norms": ("zero2", {"clip_grad_norm_": LOCAL_NORM}, "Step 3: clip", "the ranks' norms differ"),
    "freed before it computes": ("zero3", {"before_forward": EARLY_FREE}, "Step 1", "freed too early"),
    "a parameter in two units": ("zero3", {"make_units": TWICE_HOME}, "Step 0", "parameters by unit"),
    # Others.
    "padding forgotten": ("zero1", {"__init__": NOT_ALL}, "Step 0: lay", "offsets and shard_numel"),
    "gradients not averaged": ("zero1_2psi", {"_reduce_gradients": SUMMED}, "Step 3", "summed, not averaged"),
    "2Ψ wanted, 3Ψ sent": ("zero1_2psi", None, "Step 3", "found     all-reduce"),
    "weights sent twice": ("zero1", {"gather_parameters": BROADCAST}, "Step 5", "found broadcast, then all-gather"),
    "whole gradients kept": ("zero2", {"Reduction_of_finish": KEPT}, "Step 3: receive", "alive after finish"),
    "whole gradients kept where nobody looks": ("zero2", {"Reduction_of_finish": HIDDEN}, "Step 3: rec", "alive after"),
    "an all-reduce in place": ("zero2", {"Reduction_of___init__": ALL_REDUCED}, "Step 3: send", "found     all-reduce"),
    "gradients kept to the end of backward": (
        "zero2",
        {"gradients_final": AT_THE_END},
        "Step 3: inside",
        "worst moment",
    ),
    "another bucket is sent first": ("zero2", {"_send": SEND_FIRST}, "Step 3: at most", "the one before first"),
    "each bucket when it is complete": (
        "zero2",
        {"gradients_final": ANY_ORDER},
        "Step 3: inside",
        "order of self.trained",
    ),
    "the norm of this rank's shard": ("zero2", {"clip_grad_norm_": LOCAL_NORM}, "Step 3: clip", "the norm that is"),
    "a frozen bucket not freed": ("zero3", {"_free": TRAINED_ONLY}, "Step 5: free", "alive after freeing"),
    "freed by .data": ("zero3", {"_free": DATA}, "Step 5: free", "alive after freeing"),
    "a shard in place of the weight": ("zero3", {"_free": OTHER_DATA}, "Step 5: free", "was param.data set?"),
    "everything gathered at once": ("zero3", {"before_forward": ALL_AT_ONCE}, "Step 1", "order of events"),
    "no prefetch in forward": ("zero3", {"before_forward": NOT_AHEAD}, "Step 1", "order of events"),
    "no prefetch in backward": ("zero3", {"before_backward": NOT_AHEAD}, "Step 2: gather", "order of events"),
    "not freed in backward": ("zero3", {"after_backward": NEVER_FREED}, "Step 2: free", "worst moment"),
    "freed in backward as in forward": (
        "zero3",
        {"after_backward": AS_IN_FORWARD},
        "Step 2: free",
        "with reshard_after_forward=False",
    ),
    "a frozen weight freed before its backward": (
        "zero3",
        {"gradients_final": FROZEN_FREED},
        "Step 3",
        "freed too early",
    ),
    "reduced when the weights are freed": (
        "zero3",
        {"after_backward": REDUCED_HERE, "gradients_final": NEVER_FREED},
        "Step 3",
        "under no_sync()",
    ),
    "reduced when the weights are freed, and the step before is asked": (
        "zero3",
        {"after_backward": REDUCED_HERE, "gradients_final": NEVER_FREED},
        "Step 2: free",
        "backward 3, free 3, reduce 3, gather 1, wait 2, backward 2, free 2, reduce 2; to reduce a unit is for `gradi",
    ),
    "reduced before backward": (
        "zero3",
        {"before_backward": REDUCED_BEFORE, "gradients_final": NEVER_FREED},
        "Step 2: gather",
        "found None: it was sent away already. Was a unit reduced before backward had finished its gradients?",
    ),
    "freed before its backward": (
        "zero3",
        {"after_backward": OTHERS_FREED},
        "Step 2: free",
        "; unit 2 is gathered twice: was it freed before its backward?",
    ),
    "freed again in before_backward": (
        "zero3",
        {"before_backward": FREED_AGAIN},
        "Step 2: gather",
        "before_backward(root) has returned, and root is not gathered: never gathered, or freed again? read",
    ),
    "the shard sent as it is": (
        "zero3",
        {"_gather": PLAIN_GATHER},
        "Step 5: start",
        "in mixed precision: ProcessGroupGloo::allgather: invalid tensor type: the shard is float64, `flat` float32: "
        "`precision.rounded_shard(bucket)` rounds it in line",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_solutions_do_not_pass(ranks, tmp_path, capsys, which):
    name, bodies, step, said = WRONG[which]
    text = generate("zero1", ()) if bodies is None else solution(name, **bodies)
    fails(ranks(3), tmp_path, capsys, name, text, step, said)


def fails(pool, folder: Path, capsys, name: str, text: str, step: str, said: str) -> None:
    """`text` fails at the step whose title begins with `step`, and the report says `said`."""
    titles = [each.title for each in check_steps.checks_of(name)]
    place = next(number for number, title in enumerate(titles) if title.startswith(step))
    report = examine(pool, folder, name, text, first=place)
    assert report.verdicts[-1]["status"] in ("failed", "error") and len(report.verdicts) == place + 1, report.verdicts
    assert " ".join(said.split()) in " ".join(capsys.readouterr().out.split()), report.verdicts[-1]


# A mistake in a student's solution: at which step it is found, in which method what is written for what, what is said.
SLIPS = {
    "zero1": [
        ("Step 0: lay", "__init__", "min(self.params[0].element_size(), self.param_dtype.itemsize)",
         "self.params[0].element_size()", "with param_dtype bfloat16"),
        ("Step 0: lay", "__init__", "units = max(1, (end", "units = max(0, (end", "numel at N = 1"),
        ("Step 0: lay", "__init__", "(param.numel() + unit", "((param.shape or [1])[0] + unit", "none over another"),
        ("Step 3", "_reduce_gradients", "group=self.group, ", "", "outside of the engine's group"),
        ("Step 3", "_reduce_gradients", "work.wait()", "pass", "never waited for"),
        ("Step 3", "_reduce_gradients", "/= self.world_size", "/= dist.get_world_size()", "in a group of one rank"),
        ("Step 3", "_reduce_gradients", "gradient.to(piece.dtype)", "gradient", "in mixed precision"),
        ("Step 3", "_reduce_gradients", "bucket.flat_gradient /= self.world_size",
         "bucket.flat_gradient.copy_(bucket.flat_gradient / self.world_size)", "no second copy"),
        ("Step 4", "step", "self.trained", "self.buckets", "what is frozen"),
        ("Step 4", "step", "self.group", "None", "the group that gather_parameters is given"),
        ("Step 4", "step", "gather_parameters(self.trained, self.group)", "pass", "calls of gather_parameters"),
        ("Step 4", "step", "self.optimizer.step()",
         "gather_parameters(self.trained, self.group); self.optimizer.step()", "gather, th"),
        ("Step 5", "gather_parameters", "precision.rounded_shard(bucket)", "bucket.shard", "in mixed precision"),
        ("Step 5", "gather_parameters", "group=group, ", "", "outside of the engine's group"),
        ("Step 5", "gather_parameters", "work.wait()", "pass", "never waited for"),
        ("Step 5", "gather_parameters", "for bucket in buckets:",
         "for bucket in [b for b in buckets if b.params[0].requires_grad]:", "the weight blocks.1.up"),
    ],
    "zero2": [
        ("Step 3: send", "Reduction_of___init__", "gradients.take(bucket)",
         "[0 * p if p.grad is None else p.grad for p in bucket.params]", "and bucket.kept)"),
        ("Step 3: send", "Reduction_of___init__", "gradients.take(bucket)",
         "[p.grad + bucket.kept.pop(i) if i in bucket.kept else p.grad for i, p in enumerate(bucket.params)]"
         "; [setattr(p, 'grad', None) for p in bucket.params]", "NoneType"),
        ("Step 3: send", "Reduction_of___init__", "gradients.take(bucket)",
         "gradients.take(bucket); [setattr(p, 'grad', g) for p, g in zip(bucket.params, whole)]", "with a .grad after"),
        ("Step 3: send", "Reduction_of___init__", ", dtype=bucket.reduce_dtype", "", "in mixed precision"),
        ("Step 3: send", "Reduction_of___init__", "new_zeros(bucket.numel", "new_full((bucket.numel,), float('nan')",
         "padding"),
        ("Step 3: receive", "Reduction_of_finish", "self.flat = None", "pass", "alive after finish"),
        ("Step 3: receive", "Reduction_of_finish", "part if piece.grad is None else piece.grad + part", "part",
         "this rank's piece"),
        ("Step 3: receive", "Reduction_of___init__", "async_op=True)", "async_op=True); self.flat.zero_()",
         "changed or freed before the wait"),
        ("Step 3: at most", "_send", "self.group", "None", "outside of the engine's group"),
        ("Step 3: inside", "gradients_final", "self._send(first)", "break", "reduce-scatters inside backward"),
        ("Step 3: inside", "gradients_final", "self._complete.discard(first)", "pass",
         "reduce-scatters inside backward"),
        ("Step 3: clip", "clip_grad_norm_", "return total", "return None", "a tensor of shape () found NoneType"),
        ("Step 3: clip", "clip_grad_norm_", "everyone.norm(", "everyone.nan_to_num(0).norm(", "NaN on every rank"),
    ],
    "zero3": [
        ("Step 5: free", "_free", "self._wait(unit)", "unit.works.clear()", "not waited for, or too late"),
        ("Step 5: free", "_free", "guard.close(unit.params)", "pass", "guard.close(unit.params)"),
        ("Step 5: start", "_gather", "unit.works.append(work)", "work.wait()",
         "works in unit.works after _gather of unit 'blocks.0'"),
        ("Step 5: start", "_gather", "unit.works.append(work)", "work.wait()", "read the sentence on **Prefetch**"),
        ("Step 5: start", "_gather", "bucket.flat.nbytes)", "bucket.numel)",
         "bytes, its storage has 84. Does resize_() get bytes (numel() * element_size())?"),
        ("Step 5: start", "_gather", "resize_(", "resize_(2 * ", "bytes of the buffer"),
        ("Step 1", "before_forward", "*upcoming",
         "*self.units[self.units.index(unit) + 1 :][: self.prefetch]] if unit in self.units else [unit, *upcoming",
         "runs the units [2, 0, 1, 3]"),
        ("Step 1", "before_forward", "self._gather(each)", "self._gather(each); self._wait(each)", "order of events"),
        ("Step 1", "before_forward", "[unit, *upcoming]", "[*upcoming, unit]", "the root first"),
        ("Step 1", "before_forward", "self._wait(unit)", "pass",
         "before_forward(root) has returned, and root is still in flight: `_wait(unit)` is missing read"),
        ("Step 2: gather", "before_backward", "self._gather(each)", "self._gather(each); self._wait(each)",
         "order of events"),
        ("Step 2: gather", "before_backward", "self._wait(unit)", "pass",
         "before_backward(blocks.2) has returned, and blocks.2 is still in flight: `_wait(unit)` is missing read"),
        ("Step 2: free", "after_backward", "self._free(unit)", "pass", "root (blocks.1 is freed later, as"),
        ("Step 3", "gradients_final", "bucket in unit.trained:",
         "bucket in unit.trained and not self.find_unused:", "with find_unused=True"),
        ("Step 3", "gradients_final", "if bucket in unit.trained:", "if bucket is unit.buckets[0]:",
         "'blocks.0.pair' were not reduced. A unit may have several buckets: is each of `unit.trained` sent?"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_found_at_their_step(ranks, tmp_path, capsys, name):
    for step, method, right, wrong, said in SLIPS[name]:
        bodies = dict(SOLVED[name])
        assert bodies[method].count(right) == 1, right
        bodies[method] = bodies[method].replace(right, wrong)
        fails(ranks(3), tmp_path, capsys, name, solution(name, **bodies), step, said)


def test_the_reference_is_not_to_be_had(ranks, tmp_path, capsys):
    body = f"""\
            import importlib.util
            spec = importlib.util.spec_from_file_location("other", "{ROOT / "zero2.py"}")
            other = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(other)
            other.ZeRO2._send(self, bucket)
"""
    by_path, read = solution("zero2", _send=body), f'            exec(open("{ROOT / "zero2.py"}").read(), {{}})\n'
    for text in (by_path, solution("zero2", _send=read)):
        fails(ranks(3), tmp_path, capsys, "zero2", text, "Step 3: at most", "it reads zero2.py, the reference")
    (moved,) = (blank for blank in EXERCISES["zero2"].blanks if blank.source)
    path, name = moved.source.removesuffix(".py").replace("/", "."), moved.where.partition(".")[2]
    called = f"        import sys\n        return sys.modules[{path!r}].{name}(self, max_norm, norm_type)\n"
    inherited = f"        return super().{name}(max_norm, norm_type)\n"
    for text in (solution("zero2", **{name: called}), solution("zero2", **{name: inherited})):
        fails(ranks(3), tmp_path, capsys, "zero2", text, "Step 3: clip", f"it calls the function in {moved.source}")


def test_unsharded_adamw_under_ddp_fails_on_bytes_and_order(ranks, tmp_path, capsys):
    """It has nothing of a stage's inside for the steps to look at: so the checks of all steps together are asked."""
    ranks(3).run(_all_steps_of_the_impostor, folder=str(tmp_path))
    said = "\n".join(file.read_text() for file in tmp_path.glob("findings.*"))
    assert "optimizer held in step 4" in said and "collectives in a training step" in said, said
    report = examine(ranks(3), tmp_path, "zero1", impostor())
    assert report.verdicts[-1]["status"] != "passed"


def _all_steps_of_the_impostor(folder: str) -> None:
    import torch
    import torch.distributed as dist

    file = Path(folder, f"impostor{dist.get_rank()}.py")
    file.write_text(impostor())
    module = check_ranks.load("zero1", str(file))
    sheet = check_sheet.Sheet("zero1", module, torch.device("cpu"))
    for each in check_steps.checks_of("zero1")[-2:]:
        each.look(sheet)
    Path(folder, f"findings.{dist.get_rank()}").write_text(str(sheet.findings))


# As a student runs it.


def test_the_reference_is_not_taken_for_the_students_file(tmp_path):
    (moved,) = (blank.where for blank in EXERCISES["zero2"].blanks if blank.source)
    method = next(where for where in wheres("zero2") if where.startswith("ZeRO2.")).partition(".")[2]
    for text, said in (
        ("from zero2 import *\n", "imports zero2.py, the reference"),
        (generate("zero2", ()).replace(f"def {method}(", "def other("), f"no ZeRO2.{method} in it"),
        ((ROOT / "zero2.py").read_text(), f"{moved} comes from"),
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


def test_a_deadlock_names_what_every_rank_waits_in(tmp_path, capsys, monkeypatch, quick_python):
    monkeypatch.setattr(sys, "executable", quick_python)
    file, line = tmp_path / "zero1.py", "dist.all_reduce(torch.ones(3)) if dist.get_rank() else dist.barrier()"
    file.write_text(f"import torch\nimport torch.distributed as dist\n\n{line}\n")
    with pytest.raises(SystemExit) as leaving:
        check.main(["zero1", "2", "--file", str(file), "--seconds", "3", "--device", "cpu"])
    said, mistake = capsys.readouterr()
    assert leaving.value.code == 1 and "HANGS     Step 0" in said and not mistake, said + mistake
    assert "rank 0 waits in barrier, issued in line 4" in said, said
    assert "rank 1 waits in all_reduce of 12 bytes, issued in line 4" in said, said
    assert "The ranks part at collective 1 of this step:" in said, said


BOTH = ["all_reduce of 64 bytes, issued in line 7", "broadcast of 8 bytes, issued in line 90"]


@pytest.mark.parametrize(
    "second, said",
    (
        (BOTH, []),
        (
            BOTH[1:],
            ["The ranks part at collective 1 of this step:", f"rank 0 issues {BOTH[0]}", f"rank 1 issues {BOTH[1]}"],
        ),
        (BOTH[:1], [f"rank 0 issues {BOTH[1]}, collective 2 of this step; rank 1 does not"]),
        ([BOTH[0].replace("7", "9"), BOTH[1]], []),  # the same one, from two branches
        (None, []),  # that rank has died
    ),
    ids=("alike", "one skipped", "too few", "another line", "dead"),
)
def test_a_rank_that_skips_a_collective_is_told_by_its_line(second, said):
    """Not by the line where it waits at last, which may be in another method, or in the constructor."""
    verdicts = [{"status": "hang", "error": "waits", "issued": BOTH}, {"status": "hang", "error": "waits"}]
    verdicts[1] |= {} if second is None else {"issued": second}
    assert check.merge(verdicts)["others"] == ["rank 0 waits", "rank 1 waits", *said]
    verdicts[0]["status"] = "error"  # gloo refuses two sizes
    assert check.merge(verdicts)["others"] == ["rank 1 waits", *said]


def test_a_rank_that_waits_in_vain_does_not_wait_for_long(ranks, tmp_path):
    found = ranks(3).run(_wait_in_vain, folder=str(tmp_path))
    assert found[0] == {"status": "hang", "line": None, "error": "waits in barrier", "issued": []}


def _wait_in_vain(folder: str):
    import threading

    import torch.distributed as dist

    if dist.get_rank():
        return check_ranks._write(folder, 0, {"status": "error"})
    watch = check_ranks._Watch("student.py")
    with mock.patch.object(os, "_exit"), mock.patch.object(check_ranks, "PATIENCE", 0.1), watch.inside("barrier"):
        check_ranks._guard(threading.Event(), 60, watch, folder, 0)
    return json.loads(Path(folder, "0.0").read_text())


def test_how_ranks_ended_is_told(tmp_path, capsys):
    """Of four ranks the first ended by os._exit(), the others by a signal, a crash, and an exit status."""
    for rank, crash in enumerate(("", "", 'Fatal Python error: Segmentation fault\nFile "a.py", line 7 in step', "")):
        (tmp_path / f"crash.{rank}").write_text(crash)
    (tmp_path / "now.0").write_text("barrier")
    for rank, last in enumerate(("barrier", "barrier", "all_reduce of 8 bytes, issued in line 7", "barrier")):
        (tmp_path / f"now.{rank}.issued").write_text(f"broadcast of 8 bytes, issued in line 5\n{last}\n")
    said = "rank : {0} (local_rank: {0})\n exitcode : {1} (pid: 9)\n"
    errors = said.format(1, -9) + said.format(3, 5)
    report = check.Report(check_steps.checks_of("zero1"), str(tmp_path), 4, "a.py", "")
    report.read(check._how_they_died(str(tmp_path), errors, 4, "a.py"))
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("DIED Step 0") and "rank 1 was killed by SIGKILL" in said, said
    assert "rank 0 ended without a word" in said and "the last collective it was in: barrier" in said
    assert "The ranks part at collective 2 of this step: rank 0 issues barrier" in said, said
    assert "rank 2 issues all_reduce of 8 bytes, issued in line 7" in said, said
    assert "rank 2 died: Segmentation fault in line 7" in said and "rank 3 ended with exit status 5" in said


def test_from_the_first_line_to_passed(tmp_path, quick_python):
    """The commands as a student types them, in a copy of the folder, so that nobody's exercises are touched."""
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("launch.sh", "zero1.py", "zero2.py", "zero3.py"):
        shutil.copy(ROOT / part, tmp_path / part)

    def run(*arguments):
        result = subprocess.run(
            [str(tmp_path / "launch.sh"), *arguments],
            env={**os.environ, "PYTHON": quick_python, "PYTHONPATH": ""},
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


class Started(Exception):
    """Ranks were started."""


@pytest.fixture
def check_at_once(tmp_path, monkeypatch, capsys):
    """Runs `check zero3` on a file of a text, with some `verdicts` in the place of ranks, and says what was printed.

    Without verdicts no ranks may be started.
    """
    file = tmp_path / "zero3.py"

    def run(text: str, *arguments, verdicts=None) -> str:
        def ranks(name, *rest):
            if verdicts is None:
                capsys.readouterr()
                raise Started
            report = check.Report(check_steps.checks_of(name), "", 2, "zero3.py", text)
            report.verdicts = [{"status": status} for status in verdicts]
            return all(status == "passed" for status in verdicts), report

        monkeypatch.setattr(check, "run", ranks)
        file.write_text(text)
        with pytest.raises(SystemExit) as leaving:
            check.main(["zero3", *arguments, "--file", str(file), "--device", "cpu"])
        said, mistake = capsys.readouterr()
        assert not mistake and leaving.value.code == (0 if "is right" in said else 1)
        return " ".join(said.split())

    return run


def test_what_is_not_begun_is_told_without_a_rank(check_at_once):
    first, *_, last = EXERCISES["zero3"].blanks
    for text in (generate("zero3", hints=0), generate("zero3", [first.where])):
        said = check_at_once(text)
        assert said.startswith(f"to write {first.task} not written yet") and "0 of 9 passed." in said
        assert first.hint not in said and " ".join(first.hint.split()) in check_at_once(text, "--hint", "--hint")
    # What was begun, or what stands behind written steps, only ranks can tell.
    begun = generate("zero3").replace(f'    raise NotImplementedError("{first.task}")', "    return [], None\n")
    blank_too = generate("zero3").replace(
        "    raise NotImplementedError(", "    units = 1; raise NotImplementedError(", 1
    )
    for text in (begun, blank_too, generate("zero3", [last.where])):
        with pytest.raises(Started):
            check_at_once(text)


def test_a_hint_after_a_check_takes_no_other_one(check_at_once):
    text, blanks = solution("zero3"), EXERCISES["zero3"].blanks
    with pytest.raises(Started):
        check_at_once(text, "--hint")
    said = check_at_once(text, verdicts=["passed", "passed", "failed"])
    assert "about half a minute" in said.partition("passed")[0] and "2 of 9 passed" in said and " hint " not in said
    assert check_at_once(text, "--hint", verdicts=["passed", "failed"]).count(" hint ") == 1  # the record of before
    for same in (text, text + "\n# a comment\n"):
        said = check_at_once(same, "--hint")
        assert " ".join(blanks[2].hints[0].split()) in said and f"ended at: {blanks[2].task} 2 of 9 passed." in said
        assert f"then {blanks[3].task}" in said and f"then {blanks[2].task}" not in said
    for other, more in ((text + "\nmore = 1\n", ()), (text, ("3",))):  # other code, or other ranks
        with pytest.raises(Started):
            check_at_once(other, *more, "--hint")
    with pytest.raises(Started):
        check_at_once(text)  # a check is made whenever it is asked for
    assert "is right" in check_at_once(text + "\nright = 1\n", verdicts=["passed"] * 9)


def test_an_edited_file_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.setattr(exercise, "FOLDER", tmp_path / "exercises")
    shutil.copy(ROOT / "zero3.py", tmp_path)
    file = tmp_path / "exercises" / "zero3.py"
    exercise.main(["zero3"])
    text = file.read_text()
    with open(tmp_path / "zero3.py", "a") as chapter:
        chapter.write("# one line more\n")
    exercise.main(["zero3"])  # nobody has edited it, and the reference has changed since
    assert "one line more" in file.read_text() and "one line more" not in text
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
    file.write_text(generate("zero1") + "def unfinished(:\n")
    with pytest.raises(SystemExit) as leaving:
        check.main(["zero1", "--file", str(file)])
    mistake = capsys.readouterr().err
    line = len(file.read_text().splitlines())
    assert leaving.value.code == 1 and f"zero1.py, line {line}: " in mistake and mistake.count("\n") == 1, mistake
    for content, said in ((b"# \xe9\n", "zero1.py: 'utf-8' codec"), (b"\0", "zero1.py: source code string")):
        file.write_bytes(content)
        with pytest.raises(SystemExit):
            check.main(["zero1", "--file", str(file)])
        mistake = capsys.readouterr().err
        assert said in mistake and mistake.count("\n") == 1, mistake


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("exercise", "zero1", "--hints", "3"), "--hints must be 0, 1 or 2, got '3'"),
        (("exercise", "zero9"), "there are: zero1, zero1_2psi, zero2, zero3, checkpoint; not 'zero9'"),
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
