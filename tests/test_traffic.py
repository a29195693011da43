"""What each stage sends: kind, bytes and order of its collectives; unsharded AdamW fails here."""

import re

import cases_traffic as cases
import parts
import pytest


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_sequence_and_bytes_of_collectives(ranks, world_size, stage):
    ranks(world_size).run(cases.sequence_of_collectives, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_unsharded_adamw_under_ddp_fails_on_traffic(ranks, stage):
    for message in ranks(2).run(
        parts.failure, module="cases_traffic", of="sequence_of_collectives", stage=stage, engine_name="impostor"
    ):
        assert re.search("found .* expected", message), message


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("reverse", (False, True))
def test_zero2_reduces_in_one_order(ranks, world_size, reverse):
    ranks(world_size).run(cases.order_of_reductions, reverse=reverse)
