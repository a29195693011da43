"""A group of some ranks: trained over alone, beside others, or as one dimension of a mesh."""

import cases_groups as cases
import parts
import pytest


@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_subgroup_keeps_to_itself(ranks, stage):
    ranks(4).run(cases.a_group_keeps_to_itself, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_one_dimension_of_a_device_mesh(ranks, stage):
    ranks(4).run(cases.one_dimension_of_a_mesh, stage=stage)
