"""Every property of harness/properties, asked of our engines: nothing may be found."""

import copy
import itertools

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.properties.conform import in_names
from harness.properties.property import GROUPS, STAGES, NotApplicable, Subject, examine, library, subject
from harness.run.counterparts import PlainStep


def asked():
    """A parameter for every property, engine, number of ranks and case."""
    found = []
    for each in library().values():
        for case in each.cases:
            marks = [pytest.mark.xdist_group(f"{case.ranks} ranks"), *([pytest.mark.thorough] if case.thorough else [])]
            name = f"{each.name}-{case.engine}-{case.ranks}-{in_names(case.arguments)}"
            found.append(pytest.param(each.name, case.engine, case.ranks, case.arguments, marks=marks, id=name))
    return found


def on_a_rank(name: str, engine: str, case: dict) -> list | str:
    """The findings; or why there can be none: something that is not installed."""
    try:
        return examine(name, engine, case)
    except NotApplicable as reason:
        return str(reason)


@pytest.mark.parametrize("name, engine, size, case", asked())
def test_holds(ranks, name, engine, size, case):
    answers = ranks(size).run(on_a_rank, name=name, engine=engine, case=case)
    if all(isinstance(of_rank, str) for of_rank in answers):
        pytest.skip(answers[0])
    found = [str(finding) for finding in itertools.chain(*answers)]
    assert not found, "\n".join(found)


class SendsMore(PlainStep):
    """Right losses, and nothing cut: AdamW under DDP, which sends its weights around after every step, too."""

    buckets = ()

    def __init__(self, model, optimizer_cls, **options):
        super().__init__(model, optimizer_cls)
        self.ddp = DistributedDataParallel(model)

    def __call__(self, *inputs):
        return self.ddp(*inputs)

    def full_state_dict(self):
        return copy.deepcopy(self.model.state_dict())

    def training_step(self, inputs, targets, loss_fn):
        loss = super().training_step(inputs, targets, loss_fn)
        for param in self.model.parameters():
            dist.all_reduce(param.detach().clone())
        return loss


def of_the_impostor(name: str, stage: str) -> list:
    return examine(name, Subject("impostor", SendsMore, like=stage))


@pytest.mark.parametrize("name, stage", (
    *itertools.product(("held_bytes_equal_the_theory", "collectives_are_those_of_the_stage"), STAGES),
    ("what_is_shared_out_is_no_more_than_twice_there", "zero1"), ("a_step_sends_no_more_than_is_promised", "zero2"),
))  # fmt: skip
def test_who_says_it_were_a_stage_is_found_out(ranks, name, stage):
    answers = ranks(library()[name].cases[0].ranks).run(of_the_impostor, name=name, stage=stage)
    for rank, (finding,) in enumerate(answers):
        assert f"rank {rank}: " in str(finding)
        assert finding.expected != finding.found and any(word in finding.what for word in ("bytes", "collectives"))


def test_a_property_says_what_must_be_true():
    for name, each in library().items():
        assert each.group in GROUPS and each.says.endswith("."), name
        stages = {case.engine for case in each.cases}
        usual = {case.engine for case in each.cases if not case.thorough}
        assert stages == usual or not usual, f"{name} is left to --thorough for a stage"


def test_engines_of_the_registry_are_subjects():
    assert subject("zero2").like == "zero2" and subject("ddp").like is None and "bucket_mb" in subject("ddp").takes
