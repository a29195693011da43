"""A model that does not fit: built on `meta`, materialised and sharded unit by unit."""

import cases_meta as cases
import pytest
import torch


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("options", ({}, {"param_dtype": torch.bfloat16}), ids=str)
def test_the_same_seed_gives_the_weights_of_the_whole_model(ranks, world_size, options):
    ranks(world_size).run(cases.same_as_built_whole, options=options)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("from_file, param_dtype", ((False, None), (True, None), (False, torch.bfloat16)))
def test_peak_at_construction_is_the_shards_and_one_unit(ranks, world_size, from_file, param_dtype):
    for found in ranks(world_size).run(cases.peak_at_construction, from_file=from_file, param_dtype=param_dtype):
        assert found["peak"] <= found["held"] + found["unit"] + 4, found
        assert found["held"] + found["unit"] < found["whole"]  # else this would say nothing


@pytest.mark.parametrize("world_size", (2, 3))
def test_from_a_memory_mapped_state_dict(ranks, world_size):
    ranks(world_size).run(cases.from_a_state_dict)
    ranks(world_size).run(cases.only_rank_0s_values_count)
    ranks(world_size).run(cases.partly_on_meta)
    ranks(world_size).run(cases.on_meta_in_mixed_precision)


def test_what_cannot_be_materialised_is_refused(ranks):
    for rank, messages in enumerate(ranks(3).run(cases.refusals)):
        expected = [
            ("materialise", "ZeRO3(model, ..., init_fn=...)"),
            ("materialise", "ZeRO3(model, ..., init_fn=...)"),
            ("init_fn=", "state_dict=", "'embedding.weight'"),
            ("init_fn must be callable", "str"),
            ("dictionary", "list"),
            ("missing 'head.bias'", "unexpected nothing"),
            ("missing nothing", "unexpected 'tail.weight'"),
            ("'head.weight'", "(3, 4)", "(3, 5)"),
            ("nothing of this one is", "load_full_state_dict"),
            ("init_fn returned a new tensor", "in place"),
            ("init_fn=",) if rank == 1 else ("[1]",),
        ]
        assert len(messages) == len(expected)
        for message, words in zip(messages, expected):
            assert all(word in message for word in words), (message, words)
