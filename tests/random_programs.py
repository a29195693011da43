"""Random training programs: all stages and engines on 1 to 4 ranks, compared with one process in float64.

    PYTHONPATH=. python tests/random_programs.py --first 0 --count 200           draw and run 200 programs
    PYTHONPATH=. python tests/random_programs.py --first 17 --count 1 --print    the program of seed 17, as Python text

A seed gives a `Program`: a model (random_models.py), options of an engine, and a list of operations. Each rank runs the
operations twice, with the engine on its own batches and with plain torch on the batches of all ranks. A program is
correct if all losses, norms and weights are equal, and if the engine raises an error exactly where plain torch does.
A program that fails is made as small as possible, and printed as a script.

What the documentation lists as a limit is not part of a program: see `does_not_fit` and `skipped`. An error that the
documentation lists may end a program: see `DOCUMENTED`.
"""

import argparse
import dataclasses
import functools
import math
import random
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from helpers import different_on_ranks, same, storage_bytes, whole_weights
from random_models import LAYERS, Model, Part, loss_of, make_batch, make_network, output_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3
from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine, checkpoint
from zerolab.run.pool import RankFailed, run_on_ranks

CHAPTERS = {"zero1.py": ZeRO1, "zero2.py": ZeRO2, "zero3.py": ZeRO3}
ENGINES = {"zero1": ZeRO1Engine, "zero2": ZeRO2Engine, "zero3": ZeRO3Engine}
SUBJECTS = CHAPTERS | ENGINES


@dataclass(frozen=True)
class Program:
    """A model, a stage or an engine with its options, and operations: see `Run`."""

    subject: str
    ranks: int
    model: Model
    options: dict = field(default_factory=dict)
    optimizer: str = "sgd"
    groups: bool = False  # two parameter groups, by the number of dimensions
    operations: tuple = ()

    @property
    def chapter(self):
        return self.subject in CHAPTERS

    @property
    def stage(self):
        return self.subject.removesuffix(".py")

    @property
    def tolerance(self):
        """In float64 sums over the ranks differ by their order only. In mixed precision large mistakes are found."""
        return 1e-4 if "param_dtype" in self.options else 1e-10


@dataclass(frozen=True)
class Operation:
    """A method of `Run` by its name in OPERATIONS, and the method's arguments."""

    name: str
    arguments: tuple
    options: dict


def call(name, *arguments, **options):
    return Operation(name, arguments, options)


# What is documented.

# Errors where plain torch raises none: {a part of the message: what is documented}.
DOCUMENTED = {
    "was changed in place while it was gathered": "a forward that writes to its weights, in ZeRO-3",
    "norm_type must be a positive number": "engines do not count gradients that are not zero",
}


def does_not_fit(program):
    """Why the subject does not support the model, or an option; "" if it does."""
    parts, options = program.model.parts, program.options
    if program.chapter and options.keys() - {"bucket_mb", "units", "prefetch"}:
        return "a chapter has no such option"
    if program.chapter and program.groups:
        return "a chapter supports one parameter group"
    some_unused = any(part.skipped or part.kind == "experts" for part in parts)
    if some_unused and not options.get("find_unused"):
        return "without find_unused=True every backward must reach every trained parameter"
    clamps = any(part.clamps for part in parts)
    if clamps and options.keys() & {"offload_policy", "param_dtype"}:
        return "with offload_policy or param_dtype the next step overwrites what a forward writes to weights"
    if clamps and options.keys() & {"reshard_after_forward", "reshard_after_backward", "units"}:
        return "what a forward writes is an error in ZeRO-3 when the unit is freed, here only after backward"
    if any(part.kind == "turned" for part in parts) and "param_dtype" in options:
        return "complex parameters keep their dtype, and torch does not multiply a matrix by one of another dtype"
    if program.subject == "zero3.py":
        if any(part.side_loss == "recomputed" for part in parts):
            return "not detected in zero3.py: a checkpoint that runs a loss again which was added after the output"
        if any(part.recomputed == "inside" and part.returns == "dataclass" for part in parts):
            return "not detected in zero3.py: a checkpoint inside a unit that returns a dataclass"
    return ""


def skipped(run, operation):
    """Why this operation is not supported at this point of a program; "" if it is."""
    program, name = run.program, operation.name
    if name == "backward" and any(graph not in run.graphs for graph in operation.arguments):
        return "there is no such graph, as in a program that was made smaller"
    if name in ("step", "reduce", "change", "clip_norm", "clip_value"):
        if not run.backwards:
            return "no gradient: an error in all stages except zero1.py"
        if run.quiet:
            return "the last backward before a step must run outside of no_sync()"
    if name == "fail" and not program.model.parts:
        return "there is no layer that could fail"
    if name == "fail" and program.stage == "zero2" and any(part.kind == "experts" for part in program.model.parts):
        return "ranks that use different parameters have sent different buckets when an error stops a backward"
    turned = any(part.kind == "turned" for part in program.model.parts)
    if turned and (name == "clip_value" or name == "clip_norm" and math.inf in operation.arguments):
        return "torch cannot clip complex gradients by value, and has no infinity norm of empty gradients"
    if program.chapter and name in ("clip_value", "checkpoint", "load"):
        return "a chapter has no such method"
    if program.subject in ("zero2.py", "zero3.py") and name == "clip_norm":
        return "not detected in zero2.py and zero3.py: torch's clip_grad_norm_ finds no gradients"
    if program.subject == "zero1.py" and run.reduced and name == "backward":
        return "not detected in zero1.py: a backward after your own reduce_gradients()"
    in_between = run.graphs and name in ("forward", "evaluate", "input_gradient", "fail")
    if program.subject == "zero3.py" and recomputes_root(program) and (in_between or "retain" in operation.options):
        return "not detected in zero3.py: another forward or backward before one that runs a part of the root again"
    if program.subject == "zero3.py" and name == "input_gradient" and run.backwards:
        return "not detected in zero3.py: torch.autograd.grad between backward and step()"
    return ""


def recomputes_root(program):
    """Whether a checkpoint is around something that is in no unit."""
    model = program.model
    units = program.options.get("units", range(len(model.parts)))
    again = [index for index, part in enumerate(model.parts) if part.recomputed or part.side_loss == "recomputed"]
    again += [0, 1] if model.in_pairs else []
    return model.recomputed_head or any(index not in units for index in again)


# On a rank.


class Planned(Exception):
    """An error that a program raises on purpose."""


def error_of(function):
    """The error that `function()` raises, or None."""
    try:
        function()
    except Exception as error:
        return error
    return None


@functools.cache
def replicas_of_all(ranks):
    return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicas", "shards"))


@functools.cache
def first_ranks(number):
    return dist.new_group(range(number))


def make_optimizer(program, network):
    params = network.parameters()
    if program.groups:
        matrices = [param for param in network.parameters() if param.ndim > 1]
        others = [param for param in network.parameters() if param.ndim < 2]
        params = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.005}]
    if program.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(params, lr=0.01, eps=1e-5, weight_decay=0.1)


class Run:
    """One rank's run of a program. Each operation is a method, and changes both sides.

    graphs     {name: ([the loss of each rank in plain torch], this rank's loss of the engine)}
    backwards  how many backwards there were since `zero_grad()`
    quiet      whether the last one ran under `no_sync()`
    reduced    whether `reduce_gradients()` came after the last one
    """

    def __init__(self, program):
        self.program = program
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.plain = make_network(program.model)
        self.plain_optimizer = make_optimizer(program, self.plain)
        self.graphs = {}
        self.backwards, self.quiet, self.reduced = 0, False, False
        self.engine = self.build(program.subject, program.options)

    def build(self, subject, options, seed=0):
        options = dict(options)
        if options.pop("meta", False):
            network = make_network(self.program.model, device="meta")
            options["state_dict"] = {name: value.clone() for name, value in self.plain.state_dict().items()}
        else:
            network = different_on_ranks(make_network(self.program.model, seed))
        if "units" in options:
            options["units"] = [network.layers[index] for index in options["units"] if index < len(network.layers)]
        if options.get("group") == "replicas":
            options["group"] = replicas_of_all(self.ranks)
        if "offload_policy" in options:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        return SUBJECTS[subject](network, make_optimizer(self.program, network), **options)

    def both_or_none(self, expected, found):
        """Whether neither side raised an error. If both did, clear the gradients, as the documentation says."""
        if found is not None and expected is None:
            raise found
        if expected is not None:
            # Torch's only error in these programs: weights have changed since the forward.
            if found is None or "inplace" not in str(expected) or not re.search("in ?place", str(found)):
                raise AssertionError(f"plain torch raises: {expected}\nThe engine raises: {found}")
            self.zero_grad()
            self.graphs.clear()
        return expected is None

    def forward(self, graph, number):
        losses = [loss_of(self.plain, number, rank) for rank in range(self.ranks)]
        loss = loss_of(self.engine, number, self.rank)
        same(loss.detach(), losses[self.rank].detach(), self.program.tolerance, f"the loss of forward {graph}")
        self.graphs[graph] = losses, loss

    def backward(self, *graphs, quiet=False, retain=False, thread=False):
        """One backward of the sum of some losses."""
        all_losses = [self.graphs[graph] if retain else self.graphs.pop(graph) for graph in graphs]

        def expected():
            for rank in range(self.ranks):
                sum(losses[rank] for losses, _ in all_losses).div(self.ranks).backward(retain_graph=retain)

        def found():
            loss = sum(loss for _, loss in all_losses)
            with self.engine.no_sync() if quiet else nullcontext():
                if thread:
                    with ThreadPoolExecutor(1) as executor:
                        executor.submit(loss.backward, retain_graph=retain).result()
                else:
                    loss.backward(retain_graph=retain)

        if self.both_or_none(error_of(expected), error_of(found)):
            self.backwards += 1
            self.quiet, self.reduced = quiet, False

    def input_gradient(self, number):
        """The gradient of the inputs alone, as for an adversarial example."""
        gradients = []
        for network in (self.plain, self.engine):
            shift = make_batch(number, self.rank)[1].requires_grad_()
            gradients += torch.autograd.grad(loss_of(network, number, self.rank, shift), [shift])
        same(gradients[1], gradients[0], self.program.tolerance, "the gradient of the inputs")

    def evaluate(self, number, train=True):
        self.plain.train(train)
        self.engine.model.train(train)
        with torch.no_grad():
            expected = output_of(self.plain, number, self.rank)
            same(output_of(self.engine, number, self.rank), expected, self.program.tolerance, "an evaluation")
        self.plain.train()
        self.engine.model.train()

    def fail(self, number, layer, when):
        """An error in the forward or the backward of one layer, and `zero_grad()`."""

        def raise_planned(*_):
            raise Planned

        def watch(module, inputs, output):
            if output.requires_grad:
                output.register_hook(raise_planned)

        def run(network, ranks):
            module = getattr(network, "model", network).layers[layer % len(self.program.model.parts)].layer
            hook = module.register_forward_hook(raise_planned if when == "forward" else watch)
            try:
                sum(loss_of(network, number, rank) for rank in ranks).backward()
            finally:
                hook.remove()

        error_of(lambda: run(self.plain, range(self.ranks)))
        error = error_of(lambda: run(self.engine, [self.rank]))
        if error is not None and not isinstance(error, Planned):
            raise error
        self.zero_grad()

    def reduce(self):
        self.engine.reduce_gradients()
        self.reduced = True

    def change(self, factor):
        """Change the mean gradients after `reduce_gradients()`."""
        self.reduce()
        changed = [*self.plain.parameters()]
        if self.program.subject == "zero1.py":  # every rank has the whole mean
            changed += self.engine.model.parameters()
        else:
            changed += [param for group in self.engine.optimizer.param_groups for param in group["params"]]
        for param in changed:
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip_norm(self, max_norm, norm_type):
        torch_clip = torch.nn.utils.clip_grad_norm_
        expected = torch_clip(self.plain.parameters(), max_norm, norm_type)
        if self.program.chapter:  # zero1.py: after `reduce_gradients()` every `param.grad` is the mean
            self.engine.reduce_gradients()
            found = torch_clip(self.engine.model.parameters(), max_norm, norm_type)
        else:
            found = self.engine.clip_grad_norm_(max_norm, norm_type)
        same(
            found.double(), expected.double(), self.program.tolerance * max(1, expected.item()), f"the {norm_type}-norm"
        )
        self.reduced = True

    def clip_value(self, value):
        torch.nn.utils.clip_grad_value_(self.plain.parameters(), value)
        self.engine.clip_grad_value_(value)
        self.reduced = True

    def step(self):
        self.plain_optimizer.step()
        self.engine.step()
        self.reduced = False
        if self.program.stage == "zero3":
            trained = [param for param in self.engine.model.parameters() if param.requires_grad]
            assert storage_bytes(trained) == 0, "parameters are gathered after step()"

    def zero_grad(self):
        self.plain_optimizer.zero_grad()
        self.engine.zero_grad()
        self.backwards, self.quiet, self.reduced = 0, False, False

    def rate(self, factor):
        for optimizer in (self.plain_optimizer, self.engine.optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def weights(self):
        return whole_weights(self.engine) if self.program.chapter else self.engine.full_state_dict()

    def check_weights(self):
        found = self.weights()
        for name, expected in self.plain.named_parameters():
            same(found[name], expected.detach(), self.program.tolerance, f"the weight {name}")

    def load(self, factor):
        """Load whole weights."""
        state = {name: value * factor for name, value in self.engine.full_state_dict().items()}
        self.plain.load_state_dict(state)
        self.engine.load_full_state_dict(state)

    def checkpoint(self, subject, ranks, background=False):
        """Save, load and save with another stage on the first ranks, and go on with a new engine, built differently."""
        self.zero_grad()
        self.graphs.clear()
        ranks = min(ranks, self.ranks)
        folders = [tempfile.mkdtemp() if self.rank == 0 else None for _ in range(2)]
        dist.broadcast_object_list(folders, 0)
        checkpoint.save(self.engine, folders[0], step=1)
        (checkpoint.async_save if background else checkpoint.save)(self.engine, folders[0], step=2)
        if background:
            _, extra = checkpoint.load_newest(self.engine, folders[0])
            same(extra, {"step": 2}, what="the values saved with the newest checkpoint")
        groups = [first_ranks(number) for number in range(1, self.ranks + 1)]  # every rank makes all of them
        if self.rank < ranks:
            other = self.build(subject, {"group": groups[ranks - 1]}, seed=1)
            checkpoint.load(other, folders[0])
            checkpoint.save(other, folders[1], step=3)
        dist.barrier()
        options = {name: value for name, value in self.program.options.items() if name != "meta"}
        self.engine = self.build(self.program.subject, options, seed=2)
        same(checkpoint.load(self.engine, folders[1]), {"step": 3}, what="the values saved with the checkpoint")
        dist.barrier()
        if self.rank == 0:
            for folder in folders:
                shutil.rmtree(folder)


OPERATIONS = {
    method.__name__: method
    for method in (
        Run.forward,
        Run.backward,
        Run.input_gradient,
        Run.evaluate,
        Run.fail,
        Run.reduce,
        Run.change,
        Run.clip_norm,
        Run.clip_value,
        Run.step,
        Run.zero_grad,
        Run.rate,
        Run.check_weights,
        Run.load,
        Run.checkpoint,
    )
}


def run_on_rank(program):
    """Run the program. Returns "" or the documented error that ended it."""
    try:
        run = Run(program)
        for operation in program.operations:
            if not skipped(run, operation):
                OPERATIONS[operation.name](run, *operation.arguments, **operation.options)
        run.check_weights()
    except (RuntimeError, ValueError) as error:
        for text, place in DOCUMENTED.items():
            if text in str(error):
                return f"{place}: {error}"
        raise
    return ""


# Drawing, running and shortening.


def ranks_of(seed):
    return 1 + seed // 6 % 4


def draw(seed):
    """The program of a seed."""
    dice = random.Random(seed)
    subject = list(SUBJECTS)[seed % 6]
    ranks = ranks_of(seed)
    while True:
        program = Program(
            subject,
            ranks,
            draw_model(dice),
            draw_options(dice, subject, ranks),
            dice.choice(["sgd", "adamw"]),
            subject in ENGINES and dice.random() < 0.3,
        )
        if not does_not_fit(program):
            return dataclasses.replace(program, operations=tuple(draw_operations(dice, subject)))


def draw_model(dice):
    def rarely(value, usual, odds=0.15):
        return value if dice.random() < odds else usual

    parts = []
    for _ in range(dice.randint(1, 4)):
        parts.append(
            Part(
                kind=dice.choice([*LAYERS, "linear"]),
                frozen=rarely(dice.choice(["first", "whole"]), "", 0.2),
                recomputed=rarely(dice.choice(["whole", "inside"]), "", 0.3),
                returns=rarely(dice.choice(["dictionary", "dataclass"]), "tensor", 0.25),
                side_loss=rarely(dice.choice(["kept", "recomputed"]), "", 0.25),
                calls=rarely(2, 1),
                skipped=rarely(True, False, 0.1),
                clamps=rarely(True, False, 0.03),
                state_hook=rarely(True, False, 0.04),
            )
        )
    return Model(tuple(parts), *[rarely(True, False) for _ in range(4)])


def draw_options(dice, subject, ranks):
    choices = {"bucket_mb": [0, 0.001, 0.01]}
    if subject in ("zero3", "zero3.py"):
        choices = {"units": [(0,), (0, 2), (1, 2)], "prefetch": [0, 2, 3]}
    if subject in ENGINES:
        choices |= {"find_unused": [True], "reduce_dtype": [torch.float64], "offload_policy": [True]}
        if ranks % 2 == 0:
            choices["group"] = ["replicas"]
    if subject == "zero3":
        choices |= {"reshard_after_forward": [False], "reshard_after_backward": [False], "meta": [True]}
    options = {name: dice.choice(values) for name, values in choices.items() if dice.random() < 0.3}
    if subject in ENGINES and dice.random() < 0.2:
        options["param_dtype"] = torch.float32
    return options


def draw_operations(dice, subject):
    """Mostly steps of training, with everything else in between."""
    waiting = []  # graphs that had no backward
    names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    engine = subject in ENGINES
    for _ in range(dice.randint(2, 25)):
        kind = dice.choices(
            ["forward", "backward", "end", "gradients", "other", "rare"], [6, 6, 3, 2, 1, 0.7 if engine else 0.3]
        )[0]
        number = dice.randint(0, 9)
        if kind == "forward" and len(waiting) < 3:
            waiting.append(next(names))
            yield call("forward", waiting[-1], number)
        elif kind == "backward" and waiting:
            graphs = dice.sample(waiting, min(len(waiting), dice.choice([1, 1, 2])))
            how = dice.choice(["", "", "", "retain", "thread"] + ["quiet"] * 2 * engine)
            if how != "retain":
                waiting = [graph for graph in waiting if graph not in graphs]
            yield call("backward", *graphs, **({how: True} if how else {}))
        elif kind == "end":
            yield call("step")
            if dice.random() < 0.9:
                yield call("zero_grad")
            if dice.random() < 0.9:
                waiting = []
        elif kind == "gradients":
            changes = [call("reduce"), call("change", dice.choice([0.5, 3.0]))]
            if engine or subject == "zero1.py":
                changes.append(
                    call(
                        "clip_norm",
                        dice.choice([0.01, 100.0]),
                        dice.choice([2.0, 2.0, 2.0, 1.0, 1.0, math.inf, math.inf, 0.0]),
                    )
                )
                changes.append(call("clip_value", 0.01))
            yield dice.choice(changes)
        elif kind == "other":
            yield dice.choice(
                [
                    call("evaluate", number, train=dice.random() < 0.5),
                    call("evaluate", number),
                    call("input_gradient", number),
                    call("check_weights"),
                    call("rate", 0.5),
                ]
            )
        elif kind == "rare":
            rare = [call("fail", number, dice.randint(0, 3), dice.choice(["forward", "backward"])), call("zero_grad")]
            if engine:
                rare.append(call("load", 0.9))
                rare.append(
                    call("checkpoint", dice.choice(list(ENGINES)), dice.randint(1, 4), background=dice.random() < 0.3)
                )
            yield dice.choice(rare)


def failure_of(program):
    """ "", or what is wrong: the message of each rank. And whether a documented error ended the program."""
    try:
        refused = run_on_ranks(program.ranks, run_on_rank, program)
    except RankFailed as failed:
        return str(failed), False
    if any(refused) and not all(refused):
        return f"some ranks raise a documented error, and others none: {refused}", True
    return "", any(refused)


def kind_of(failure):
    """The last line of a failure without its numbers and names, to tell one failure from another."""
    last = failure.strip().splitlines()[-1]
    return re.sub(r"[\d.e+-]+|'.*?'|forward \w", "", last)[:60]


def shorten(program, failure, seconds, run=failure_of):
    """(a smaller program that fails like `program`, its failure). `run` replaces `failure_of` in a test."""
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for smaller in smaller_programs(program):
            if time.monotonic() > end:
                return program, failure
            if does_not_fit(smaller):
                continue
            found, _ = run(smaller)
            if found and kind_of(found) == kind_of(failure):
                program, failure, again = smaller, found, True
                break
    return program, failure


def smaller_programs(program):
    """Programs with one thing less, the largest things first."""
    replace = dataclasses.replace
    operations = program.operations
    for ranks in range(1, program.ranks):  # fewer ranks also start faster
        if "group" not in program.options or ranks % 2 == 0:
            yield replace(program, ranks=ranks)
    for size in (8, 4, 2, 1):
        for begin in range(0, len(operations), size):
            yield replace(program, operations=operations[:begin] + operations[begin + size :])
    model = program.model
    for index, part in enumerate(model.parts):
        yield replace(program, model=replace(model, parts=model.parts[:index] + model.parts[index + 1 :]))
        for each in fields_that_differ(part):
            plainer = replace(part, **{each.name: each.default})
            yield replace(
                program, model=replace(model, parts=(*model.parts[:index], plainer, *model.parts[index + 1 :]))
            )
    for each in fields_that_differ(model):
        if each.name != "parts":
            yield replace(program, model=replace(model, **{each.name: each.default}))
    for name in program.options:
        yield replace(program, options={other: value for other, value in program.options.items() if other != name})
    if program.groups:
        yield replace(program, groups=False)
    if program.optimizer != "sgd":
        yield replace(program, optimizer="sgd")
    for index, operation in enumerate(operations):
        for name in operation.options:
            options = {other: value for other, value in operation.options.items() if other != name}
            simpler = replace(operation, options=options)
            yield replace(program, operations=(*operations[:index], simpler, *operations[index + 1 :]))


# Printing.


def fields_that_differ(value):
    """The fields of a dataclass that do not have their default."""
    return [each for each in dataclasses.fields(value) if getattr(value, each.name) != default_of(each)]


def default_of(each):
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def as_text(value):
    """Python text of a part, a model or an operation, without the fields that have their default."""
    if isinstance(value, Operation):
        arguments = [*map(repr, value.arguments), *(f"{name}={each!r}" for name, each in value.options.items())]
        return f"call({', '.join([repr(value.name), *arguments])})"
    if dataclasses.is_dataclass(value):
        arguments = [f"{each.name}={as_text(getattr(value, each.name))}" for each in fields_that_differ(value)]
        return f"{type(value).__name__}({', '.join(arguments)})"
    if isinstance(value, tuple):
        return f"({''.join(as_text(each) + ', ' for each in value).rstrip(' ')})"
    return repr(value)


def as_script(program):
    """A program that can be saved in a file and run."""
    lines = [f"    {each.name}={as_text(getattr(program, each.name))}," for each in fields_that_differ(program)[:-1]]
    operations = [f"        {as_text(operation)}," for operation in program.operations]
    return "\n".join(
        [
            "# Save this as program.py, and run: PYTHONPATH=.:tests python program.py",
            "from math import inf",
            "import torch",
            "from random_programs import Model, Part, Program, call, check",
            "",
            "program = Program(",
            *lines,
            "    operations=(",
            *operations,
            "    ),",
            ")",
            'if __name__ == "__main__":',
            "    check(program)",
        ]
    )


def check(program):
    """Raise AssertionError with the failure of a program, if it has one."""
    failure, refused = failure_of(program)
    assert not failure, failure
    print("ended by a documented error" if refused else "correct")


def report_of(seed, seconds=60):
    """ "", or the failure of a seed's program and the shortened program."""
    failure, _ = failure_of(draw(seed))
    if not failure:
        return ""
    program, failure = shorten(draw(seed), failure, seconds)
    return f"The program of seed {seed}, shortened, fails with\n\n{failure}\n\n{as_script(program)}\n"


def main():
    parser = argparse.ArgumentParser(description="Run random training programs, and print those that fail.")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=60, help="how long a failing program is shortened")
    parser.add_argument("--print", action="store_true", help="print the programs, and do not run them")
    options = parser.parse_args()
    found = 0
    seeds = range(options.first, options.first + options.count)
    for seed in sorted(seeds, key=ranks_of):  # so that one group of ranks works at a time
        if options.print:
            print(f"# Seed {seed}\n{as_script(draw(seed))}\n")
        else:
            report = report_of(seed, options.seconds)
            found += bool(report)
            print(report or f"seed {seed}: {draw(seed).subject} on {ranks_of(seed)} rank(s): correct", flush=True)
    if not options.print:
        print(f"{options.count} programs, {found} wrong")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
