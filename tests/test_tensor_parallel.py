"""A stage in one dimension of a mesh, torch's tensor parallelism in the other."""

import cases_tensor_parallel as cases
import pytest


@pytest.mark.parametrize(
    "stage, sequence", [("zero1", True), ("zero2", True), ("zero3", True), ("zero3", False)], ids=str
)
def test_equals_one_process(ranks, stage, sequence):
    ranks(4).run(cases.like_one_process, stage=stage, sequence=sequence)


def test_what_cannot_work_is_refused(ranks):
    ranks(4).run(cases.refusals, stage="zero3")
