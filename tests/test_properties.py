"""Every property of zerolab/properties, asked of our engines: nothing may be found."""

import itertools

import pytest
import torch

from zerolab.properties.conform import in_names, size_of
from zerolab.properties.property import STAGES, NotApplicable, Subject, examine, library, subject
from zerolab.run import engines
from zerolab.run.counterparts import ddp


def on_ranks(size: int, *values, marks=(), **named):
    """A parameter of a test that is run where so many ranks are."""
    return pytest.param(size, *values, marks=[pytest.mark.xdist_group(f"{size} ranks"), *marks], **named)


def asked():
    """A parameter for every property, number of ranks, engine and case."""
    for each in library().values():
        for case in each.cases:
            marks = [pytest.mark.thorough] if case.thorough else []
            name = f"{each.name}-{case.engine}-{case.ranks}-{in_names(case.arguments)}"
            yield on_ranks(case.ranks, each.name, case.engine, case.arguments, marks=marks, id=name)


def on_a_rank(name: str, engine: str, case: dict) -> list | str:
    """The findings; or why there can be none: something that is not installed."""
    try:
        return examine(name, engine, case)
    except NotApplicable as reason:
        return str(reason)


@pytest.mark.parametrize("size, name, engine, case", asked())
def test_holds(ranks, size, name, engine, case):
    answers = ranks(size).run(on_a_rank, name=name, engine=engine, case=case)
    if all(isinstance(of_rank, str) for of_rank in answers):
        pytest.skip(answers[0])
    found = [str(finding) for finding in itertools.chain(*answers)]
    assert not found, "\n".join(found)


def as_ddp(model, optimizer_cls, **options):
    """Right losses, and nothing cut."""
    return ddp(model, optimizer_cls, torch.device("cpu"))


def of_an_impostor(name: str, build, stage: str) -> list:
    return examine(name, Subject("impostor", build, like=stage))


def impostors():
    """(a property, what is built, the stage that it says it were)"""
    properties = ("held_bytes_equal_the_theory", "collectives_are_those_of_the_stage")
    yield from itertools.product(properties, (as_ddp,), STAGES)
    yield "what_is_shared_out_is_no_more_than_twice_there", as_ddp, "zero1"
    yield "a_step_sends_no_more_than_is_promised", engines.STAGES["zero3"], "zero2"


@pytest.mark.parametrize(
    "size, name, build, stage",
    [on_ranks(size_of(library()[each[0]], 2), *each) for each in impostors()],
)
def test_who_says_it_were_a_stage_is_found_out(ranks, size, name, build, stage):
    for rank, (finding,) in enumerate(ranks(size).run(of_an_impostor, name=name, build=build, stage=stage)):
        assert f"rank {rank}: " in str(finding)
        assert finding.expected != finding.found and any(word in finding.what for word in ("bytes", "collectives"))


def test_engines_of_the_registry_are_subjects():
    assert subject("zero2").like == "zero2" and subject("ddp").like is None and "bucket_mb" in subject("ddp").takes
