"""Wrong chapters: statements of the chapters, what takes their place, and the test that fails then.

test_deleted_lines.py has those of the lists at the ends of the chapters, with what one sees.

A statement is found in the syntax tree of its function, so that comments and layout may change. It must be there
exactly once.
"""

import ast
import contextlib
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zerolab.run.ranks import ROOT


@dataclass(frozen=True)
class Mutation:
    """In `function` of `chapter`, `statement` becomes `replacement`. For `if ...:` only the line itself is replaced."""

    chapter: str  # "zero1"
    function: str  # "ZeRO1.step", or "take_over"
    statement: str
    replacement: str = "pass"
    found_by: str = ""  # a test of the default suite that fails with it, in one of its cases

    def __str__(self):
        return f"{self.function}: {self.statement}" + (f" -> {self.replacement}" if self.replacement != "pass" else "")


def mutated_source(*mutations):
    """The text of the chapter with the mutations, without comments. Raises LookupError if one does not fit."""
    tree = ast.parse((ROOT / f"{mutations[0].chapter}.py").read_text())
    for mutation in mutations:
        function = find_function(tree, mutation.function)
        places = list(places_of(function, mutation.statement))
        if len(places) != 1:
            raise LookupError(f"{mutation.statement!r} is {len(places)} times in {mutation.function}, expected once")
        body, index = places[0]
        if mutation.statement.startswith("if "):
            body[index].test = ast.parse(f"{mutation.replacement} pass").body[0].test
        else:
            body[index : index + 1] = ast.parse(mutation.replacement).body
    return ast.unparse(ast.fix_missing_locations(tree))


def find_function(tree, name):
    for part in name.split("."):
        found = [node for node in tree.body if getattr(node, "name", None) == part]
        if len(found) != 1:
            raise LookupError(f"there is no {name}")
        tree = found[0]
    return tree


def places_of(function, statement):
    """(the list that has the statement, its index) for each place inside of the function."""
    is_if = statement.startswith("if ")
    wanted = ast.unparse(ast.parse(f"{statement} pass" if is_if else statement).body[0])
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            body = getattr(node, name, None)
            for index, each in enumerate(body if isinstance(body, list) else []):
                text = ast.unparse(each)
                if text == wanted or (is_if and text.split("\n")[0] == wanted.split("\n")[0]):
                    yield body, index


@contextlib.contextmanager
def mutated(mutation):
    """Inside, importing the chapter gives the wrong one. Yields its module. Earlier imports keep the right one."""
    name = mutation.chapter
    before = sys.modules.get(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.py")
        file.write_text(mutated_source(mutation))
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            yield module
        finally:
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before


# Tests of the default suite that find several mutations.
LATE = "conformance/test_late_collectives.py::test_a_collective_may_run_as_late_as_its_wait"
FOR_NOTHING = "conformance/test_late_collectives.py::test_a_unit_that_was_gathered_for_nothing_is_waited_for"
ALIGNED = "test_chapters.py::test_parameters_and_shards_begin_at_aligned_places"
ADD_UP = "test_chapters.py::test_gradients_add_up_until_zero_grad"
OLD_GRAPH = "test_chapters.py::test_a_graph_of_before_the_step_is_an_error"
TWICE = "test_chapters.py::test_zero3_gathers_each_unit_twice"
EVENTS = "test_chapters.py::test_models_that_need_one_of_the_events_of_backward"
BY_HAND = "test_chapters.py::test_gradients_can_be_read_and_clipped_by_hand"

# The rest of the table: mutations that the chapters' lists do not have.

ALL_REDUCE = "return dist.all_reduce(bucket.gradient, group=self.group, async_op=True)"
WAIT_AND_FINISH = "work.wait(); self.finish_reduce(bucket)"
REDUCE_SCATTER = (
    "self.work = reduce_scatter(self.shard_gradient, self.gradient, group=self.bucket.group, async_op=True)"
)
OTHERS = [
    Mutation(
        "zero1",
        "Bucket.assign_places",
        "end += round_up(param.numel(), align)",
        "end += param.numel()",
        found_by=ALIGNED,
    ),
    Mutation(
        "zero1",
        "Bucket.assign_places",
        "self.shard_numel = round_up(shard, align)",
        "self.shard_numel = shard",
        found_by=ALIGNED,
    ),
    Mutation(
        "zero1",
        "Bucket.assign_places",
        "shard = round_up(max(end, 1), self.world_size) // self.world_size",
        "shard = round_up(end, self.world_size) // self.world_size",
        found_by=ALIGNED,
    ),
    Mutation(
        "zero1",
        "Bucket.make_shard",
        "return self.flat[self.own]",
        "return self.flat[self.own].clone()",
        found_by="conformance/test_memory.py::test_held_bytes_are_the_accounting",
    ),
    Mutation(
        "zero1",
        "Bucket.lay_out",
        "self.place(flat, index).copy_(tensor)",
        found_by=LATE,
    ),
    Mutation(
        "zero1",
        "Bucket.lay_out",
        "flat[self.offsets[index] + tensor.numel():next_offsets[index]].zero_()",
        found_by=ALIGNED,
    ),
    Mutation(
        "zero1",
        "ZeRO1.finish_reduce",
        "bucket.shard.grad = bucket.gradient[bucket.own]",
        "bucket.shard.grad = bucket.gradient[bucket.own].clone()",
        found_by=BY_HAND,
    ),
    Mutation(
        "zero1",
        "ZeRO1.start_reduce",
        ALL_REDUCE,
        "return dist.all_reduce(bucket.gradient, async_op=True)",
        found_by="conformance/test_loops.py::test_changed_gradients_stay_changed_in_a_further_backward",
    ),
    Mutation(
        "zero1",
        "ZeRO1.reduce_gradients",
        "if self.buckets[0].shard.grad is not None:",
        "if False:",
        found_by=BY_HAND,
    ),
    Mutation(
        "zero1",
        "ZeRO1.reduce_gradients",
        "self.finish_reduce(bucket)",
        found_by=LATE,
    ),
    Mutation(
        "zero1",
        "ZeRO1.step",
        "self.optimizer.step()",
        found_by=LATE,
    ),
    Mutation(
        "zero1",
        "ZeRO1.step",
        "self.reduce_gradients()",
        found_by=LATE,
    ),
    Mutation(
        "zero1",
        "gather_parameters",
        "works.append(bucket.gather())",
        "works.append(buckets[0].gather())",
        found_by="conformance/test_values.py::test_the_size_of_buckets_changes_no_value",
    ),
    Mutation(
        "zero2",
        "Reduction.deliver",
        "shard.grad += self.shard_gradient",
        "shard.grad = self.shard_gradient",
        found_by=ADD_UP,
    ),
    Mutation(
        "zero2",
        "Reduction.start",
        REDUCE_SCATTER,
        "self.work = reduce_scatter(self.shard_gradient, self.gradient, async_op=True)",
        found_by="conformance/test_traffic.py::test_replicas_send_only_shards_of_gradients",
    ),
    Mutation(
        "zero2",
        "ZeRO2.reduce_gradients",
        "check_complete(self.buckets)",
        found_by="test_chapters.py::test_refuses_gradients_that_are_set_after_they_were_sent",
    ),
    Mutation(
        "zero2",
        "ZeRO2.receive",
        "self.in_flight = None",
        found_by=LATE,
    ),
    Mutation(
        "zero2",
        "ZeRO2.on_gradient",
        "check_gradient(bucket, param)",
        found_by="test_chapters.py::test_zero2_refuses_a_second_gradient_of_a_bucket_that_was_not_complete",
    ),
    Mutation(
        "zero2",
        "ZeRO2.expect_gradients",
        "self.turn = 0",
        found_by=LATE,
    ),
    Mutation(
        "zero2",
        "ZeRO2.send",
        "self.in_flight.start()",
        "self.in_flight.start(); self.receive()",
        found_by="conformance/test_late_collectives.py::test_backward_computes_while_a_reduction_is_in_flight",
    ),
    Mutation(
        "zero3",
        "parameters_by_unit",
        "home_of_param[param] = home if home_of_param.get(param, home) is home else model",
        "home_of_param[param] = home",
        found_by="test_chapters.py::test_a_weight_of_several_units_is_the_roots",
    ),
    Mutation(
        "zero3",
        "parameters_by_unit",
        "home_of_module[module] = model if module in home_of_module else top",
        "home_of_module[module] = top",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "ZeRO3.plan_prefetch",
        "ahead = prefetch if self.world_size > 1 else 0",
        "ahead = prefetch",
        found_by="test_chapters.py::test_a_single_rank_gathers_nothing_ahead",
    ),
    Mutation(
        "zero3",
        "ZeRO3.plan_prefetch",
        "root.preceding = inner[::-1][:ahead]",
        "root.preceding = inner[:ahead]",
        found_by="conformance/test_traffic.py::test_sent_is_the_accounting",
    ),
    Mutation(
        "zero3",
        "ZeRO3.plan_prefetch",
        "unit.preceding = inner[max(0, index - ahead):index][::-1]",
        "unit.preceding = inner[max(0, index - ahead):index]",
        found_by="conformance/test_traffic.py::test_units_are_gathered_in_the_order_of_their_use",
    ),
    Mutation(
        "zero3",
        "Unit.start_gather",
        "self.flat.untyped_storage().resize_(self.flat.nbytes)",
        "self.flat.untyped_storage().resize_(self.flat.numel())",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "Unit.start_gather",
        "self.allocated = True",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "Unit.wait",
        "self.work.wait()",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "Unit.wait",
        "self.work = None",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "Unit.free",
        "self.wait()",
        found_by=FOR_NOTHING,
    ),
    Mutation(
        "zero3",
        "Unit.free",
        "self.allocated = False",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "ZeRO3.before_forward",
        "unit.wait()",
        "for each in (unit, *unit.following): each.wait()",
        found_by="conformance/test_traffic.py::test_zero3_gathers_the_next_unit_while_the_present_one_computes",
    ),
    Mutation(
        "zero3",
        "ZeRO3.before_backward",
        "unit.wait()",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "ZeRO3.before_backward",
        "unit.start_gather()",
        found_by=FOR_NOTHING,
    ),
    Mutation(
        "zero3",
        "ZeRO3.end_backward",
        "self.receive()",
        found_by=TWICE,
    ),
    Mutation(
        "zero3",
        "ZeRO3.end_backward",
        "self.free_all()",
        found_by="conformance/test_memory.py::test_zero3_frees_a_unit_that_is_gathered_again",
    ),
    Mutation(
        "zero3",
        "ZeRO3.on_output",
        "if unit.missing:",
        "if True:",
        found_by="conformance/test_models.py::test_a_tensor_that_is_passed_on_brings_nothing_back",
    ),
    Mutation(
        "zero3",
        "ZeRO3.on_gradient",
        "self.notice_backward()",
        found_by="conformance/test_loops.py::test_several_backwards_before_a_step_add_up",
    ),
    Mutation(
        "zero3",
        "ZeRO3.on_gradient",
        "unit.missing.remove(param)",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "ZeRO3.finish",
        "self.send(unit)",
        found_by=LATE,
    ),
    Mutation(
        "zero3",
        "ZeRO3.unpack",
        "check_allocated(unit)",
        found_by="conformance/test_checks.py::test_saved_weights_outside_of_a_backward",
    ),
]

# Other ways to write a function, which are as correct as the chapter's.
RIGHT = {
    "zero1, divided before the sum": [
        Mutation(
            "zero1",
            "ZeRO1.start_reduce",
            ALL_REDUCE,
            f"bucket.gradient /= self.world_size\n{ALL_REDUCE}",
        ),
        Mutation("zero1", "ZeRO1.finish_reduce", "bucket.gradient /= self.world_size"),
    ],
    "zero1, waits in the other order": [
        Mutation(
            "zero1",
            "ZeRO1.reduce_gradients",
            f"for bucket, work in zip(self.buckets, works):\n    {WAIT_AND_FINISH}",
            f"for bucket, work in reversed(list(zip(self.buckets, works))):\n    {WAIT_AND_FINISH}",
        ),
    ],
    "zero1, padding by torch.zeros": [
        Mutation(
            "zero1",
            "Bucket.lay_out",
            "flat = torch.empty(self.numel, dtype=dtype, device=self.params[0].device)",
            "flat = torch.zeros(self.numel, dtype=dtype, device=self.params[0].device)",
        ),
        Mutation("zero1", "Bucket.lay_out", "flat[self.offsets[index] + tensor.numel():next_offsets[index]].zero_()"),
    ],
    "zero2, divided before the sum": [
        Mutation(
            "zero2",
            "Reduction.start",
            REDUCE_SCATTER,
            f"self.gradient /= self.bucket.world_size\n{REDUCE_SCATTER}",
        ),
        Mutation("zero2", "Reduction.average", "self.shard_gradient /= self.bucket.world_size"),
    ],
    "zero3, the storage of a parameter": [
        Mutation(
            "zero3",
            "Unit.free",
            "self.flat.untyped_storage().resize_(0)",
            "self.params[0].untyped_storage().resize_(0)",
        ),
    ],
    "zero3, a list of its own": [
        Mutation(
            "zero3",
            "ZeRO3.before_forward",
            "for each in (unit, *unit.following):\n    each.start_gather()",
            "unit.start_gather()\nfor each in unit.following:\n    each.start_gather()",
        ),
    ],
}
