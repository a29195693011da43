"""Random training programs: all stages and engines on 1 to 4 ranks, compared with one process in float64.

    PYTHONPATH=. python tests/random_programs.py --first 0 --count 200           draw and run 200 programs
    PYTHONPATH=. python tests/random_programs.py --first 17 --count 1 --print    the program of seed 17, as a script

A seed gives a `Program`: a model (random_models.py), options of an engine, and a list of operations. Each rank runs the
operations twice, with the engine on its own batches and with plain torch on the batches of all ranks. A program is
correct if all losses, norms and weights are equal, and if the engine raises an error exactly where plain torch does.
A program that fails is printed as a script, from which parts and operations can be deleted.

What the documentation lists as a limit is not part of a program: see `does_not_fit` and `skipped`.
"""

import argparse
import dataclasses
import functools
import pprint
import random
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from helpers import different_on_ranks, same, whole_weights
from random_models import LAYERS, Model, Part, loss_of, make_batch, make_network, output_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3
from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine, checkpoint
from zerolab.measure.held import storage_bytes
from zerolab.run.pool import RankFailed, run_on_ranks

CHAPTERS = {"zero1.py": ZeRO1, "zero2.py": ZeRO2, "zero3.py": ZeRO3}
ENGINES = {"zero1": ZeRO1Engine, "zero2": ZeRO2Engine, "zero3": ZeRO3Engine}
SUBJECTS = CHAPTERS | ENGINES


@dataclass(frozen=True)
class Program:
    """A model, a stage or an engine with its options, and operations: (a method of `Run`, *its arguments) each."""

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


# What is documented.


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
    if options.get("group") and program.ranks % 2:
        return "two replicas have half of the ranks each"
    if any(part.kind == "turned" for part in parts) and "param_dtype" in options:
        return "complex parameters keep their dtype, and torch does not multiply a matrix by one of another dtype"
    if program.subject == "zero3.py":
        if any(part.side_loss == "recomputed" for part in parts):
            return "not detected in zero3.py: a checkpoint that runs a loss again which was added after the output"
        if any(part.recomputed == "inside" and part.returns == "dataclass" for part in parts):
            return "not detected in zero3.py: a checkpoint inside a unit that returns a dataclass"
    return ""


def skipped(run, name, arguments):
    """Why this operation is not supported at this point of a program; "" if it is."""
    program = run.program
    if name == "backward" and not run.graphs:
        return "there was no forward"
    if name in ("update", "step", "reduce", "change", "clip_norm", "clip_value"):
        if not run.backwards:
            return "no gradient: an error in all stages except zero1.py"
        if run.quiet:
            return "the last backward before a step must run outside of no_sync()"
    if name == "fail" and not program.model.parts:
        return "there is no layer that could fail"
    if name == "fail" and program.stage == "zero2" and any(part.kind == "experts" for part in program.model.parts):
        return "ranks that use different parameters have sent different buckets when an error stops a backward"
    turned = any(part.kind == "turned" for part in program.model.parts)
    if turned and (name == "clip_value" or name == "clip_norm" and "inf" in arguments):
        return "torch cannot clip complex gradients by value, and has no infinity norm of empty gradients"
    if program.subject in ("zero2.py", "zero3.py") and name == "clip_norm":
        return "not detected in zero2.py and zero3.py: torch's clip_grad_norm_ finds no gradients"
    if program.subject == "zero1.py" and run.reduced and name == "backward":
        return "not detected in zero1.py: a backward after your own reduce_gradients()"
    in_between = run.graphs and name in ("forward", "evaluate", "input_gradient", "fail", "step", "check_weights")
    if program.subject == "zero3.py" and recomputes_root(program) and (in_between or "retain" in arguments):
        return "not detected in zero3.py: another pass or a step before a backward that runs a part of the root again"
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

    graphs     of each forward, the oldest first: ([each loss of plain torch], this rank's loss of the engine)
    backwards  how many backwards there were since `zero_grad()`
    quiet      whether the last one ran under `no_sync()`
    reduced    whether `reduce_gradients()` came after the last one
    """

    def __init__(self, program):
        self.program = program
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.plain = make_network(program.model)
        self.plain_optimizer = make_optimizer(program, self.plain)
        self.graphs = []
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

    def forward(self, number):
        losses = [loss_of(self.plain, number, rank) for rank in range(self.ranks)]
        loss = loss_of(self.engine, number, self.rank)
        same(loss.detach(), losses[self.rank].detach(), self.program.tolerance, f"the loss of batch {number}")
        self.graphs = [*self.graphs[-2:], (losses, loss)]

    def backward(self, which, how):
        """One backward of the sum of some losses: the newest one (-1), the oldest one (1) or the two oldest ones (2).

        how     "", "retain" the graph, in a "thread", or "quiet": under `no_sync()`
        """
        retain, thread, quiet = how == "retain", how == "thread", how == "quiet"
        first, last = self.graphs[:which], self.graphs[which:]
        chosen, rest = (first, last) if which > 0 else (last, first)
        if not retain:
            self.graphs = rest

        def expected():
            for rank in range(self.ranks):
                sum(losses[rank] for losses, _ in chosen).div(self.ranks).backward(retain_graph=retain)

        def found():
            loss = sum(loss for _, loss in chosen)
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

    def evaluate(self, number, train):
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
        norm_type = float(norm_type)
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

    def update(self):
        """The usual end of a step of training."""
        self.step()
        self.zero_grad()
        self.graphs.clear()

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

    def checkpoint(self, subject, ranks, background):
        """Save, load and save with another stage on the first ranks, and go on with a new engine, built differently."""
        self.zero_grad()
        self.graphs.clear()
        ranks = min(ranks, self.ranks)
        folders = [tempfile.mkdtemp() if self.rank == 0 else None for _ in range(2)]
        dist.broadcast_object_list(folders, 0)
        checkpoint.save(self.engine, folders[0], step=1)
        if background:
            checkpoint.async_save(self.engine, folders[0], step=2)
            _, extra = checkpoint.load_newest(self.engine, folders[0])
            same(extra, {"step": 2}, what="the values saved with the newest checkpoint")
        else:
            checkpoint.save(self.engine, folders[0], step=2)
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


def run_on_rank(program):
    run = Run(program)
    for name, *arguments in program.operations:
        if not skipped(run, name, arguments):
            getattr(run, name)(*arguments)
    run.check_weights()


# Drawing.

# {a field or an option: (how often it has another value than the usual one, *the other values)}
PART = {
    "kind": (0.9, *LAYERS),
    "frozen": (0.2, "first", "whole"),
    "recomputed": (0.3, "whole", "inside"),
    "returns": (0.25, "dictionary", "dataclass"),
    "side_loss": (0.25, "kept", "recomputed"),
    "calls": (0.15, 2),
    "skipped": (0.1, True),
}
MODEL = dict.fromkeys(["tied", "recomputed_head", "frozen_start", "in_pairs"], (0.15, True))
OPTIONS_OF_BUCKETS = {"bucket_mb": (0.3, 0, 0.001, 0.01)}
OPTIONS_OF_UNITS = {"units": (0.3, (0,), (0, 2), (1, 2)), "prefetch": (0.3, 0, 2, 3)}
OPTIONS_OF_ENGINES = {
    "find_unused": (0.3, True),
    "reduce_dtype": (0.3, torch.float64),
    "param_dtype": (0.2, torch.float32),
    "offload_policy": (0.3, True),
    "group": (0.3, "replicas"),
    "whole": (0.2, True),
}
OPTIONS_OF_ZERO3 = dict.fromkeys(["reshard_after_forward", "reshard_after_backward"], (0.3, False))
OPTIONS_OF_ZERO3 |= {"meta": (0.3, True)}

# {a method of `Run`: (how often, *the values of each argument)}.
OPERATIONS = {
    "forward": (6, range(10)),
    "backward": (6, [-1, 1, 2], ["", "", "", "retain", "thread"]),
    "update": (2.5,),
    "step": (0.5,),
    "zero_grad": (0.5,),
    "reduce": (0.5,),
    "change": (0.5, [0.5, 3.0]),
    "clip_norm": (0.5, [0.01, 100.0], [2.0, 2.0, 1.0, "inf"]),
    "evaluate": (0.4, range(10), [True, True, False]),
    "input_gradient": (0.2, range(10)),
    "check_weights": (0.2,),
    "rate": (0.2, [0.5]),
    "fail": (0.2, range(10), range(4), ["forward", "backward"]),
}
OPERATIONS_OF_ENGINES = {
    "backward": (6, [-1, 1, 2], ["", "", "", "retain", "thread", "quiet", "quiet"]),
    "clip_value": (0.5, [0.01]),
    "load": (0.2, [0.9]),
    "checkpoint": (0.2, list(ENGINES), range(1, 5), [True, False, False]),
}


def ranks_of(seed):
    return 1 + seed // 6 % 4


def draw(seed):
    """The program of a seed."""
    dice = random.Random(seed)
    subject, ranks = list(SUBJECTS)[seed % 6], ranks_of(seed)
    options = OPTIONS_OF_UNITS if subject.startswith("zero3") else OPTIONS_OF_BUCKETS
    operations = OPERATIONS
    if subject in ENGINES:
        options = options | OPTIONS_OF_ENGINES | (OPTIONS_OF_ZERO3 if subject == "zero3" else {})
        operations = operations | OPERATIONS_OF_ENGINES
    while True:
        parts = tuple(Part(**draw_values(dice, PART)) for _ in range(dice.randint(1, 4)))
        model = Model(parts, **draw_values(dice, MODEL))
        groups = subject in ENGINES and dice.random() < 0.3
        program = Program(subject, ranks, model, draw_values(dice, options), dice.choice(["sgd", "adamw"]), groups)
        if not does_not_fit(program):
            break
    odds = [often for often, *_ in operations.values()]
    names = dice.choices(list(operations), odds, k=dice.randint(3, 36))
    drawn = tuple((name, *map(dice.choice, operations[name][1:])) for name in names)
    return dataclasses.replace(program, operations=drawn)


def draw_values(dice, table):
    return {name: dice.choice(values) for name, (often, *values) in table.items() if dice.random() < often}


# Running.


def as_script(program):
    """A program that can be saved in a file and run."""
    return f"""\
# Save this as program.py, and run: PYTHONPATH=.:tests python program.py
import torch
from random_programs import Model, Part, Program, check

program = {pprint.pformat(program)}
if __name__ == "__main__":
    check(program)
"""


def check(program):
    """Raise RankFailed with the message of each rank if the program is wrong."""
    run_on_ranks(program.ranks, run_on_rank, program)
    print("correct")


def report_of(seed):
    """ "", or the failure of a seed's program and the program."""
    program = draw(seed)
    try:
        run_on_ranks(program.ranks, run_on_rank, program)
    except RankFailed as failed:
        return f"The program of seed {seed} fails with\n\n{failed}\n\n{as_script(program)}\n"
    return ""


def main():
    parser = argparse.ArgumentParser(description="Run random training programs, and print those that fail.")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first program (default 0)")
    parser.add_argument("--count", type=int, default=100, help="the number of programs (default 100)")
    parser.add_argument("--print", action="store_true", help="print the programs instead of running them")
    options = parser.parse_args()
    found = 0
    seeds = range(options.first, options.first + options.count)
    for seed in sorted(seeds, key=ranks_of):  # so that one group of ranks works at a time
        if options.print:
            print(f"# Seed {seed}\n{as_script(draw(seed))}\n")
        else:
            report = report_of(seed)
            found += bool(report)
            print(report or f"seed {seed}: {draw(seed).subject} on {ranks_of(seed)} rank(s): correct", flush=True)
    if not options.print:
        print(f"{options.count} programs, {found} wrong")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
