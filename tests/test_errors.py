"""Bad input, faults in a step, and freed weights: clear errors on every rank."""

import cases_errors as cases
import parts
import pytest
import torch

from harness.run import process_group


@pytest.mark.parametrize("world_size", (1, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_bad_models_and_options(ranks, world_size, stage):
    answers = ranks(world_size).run(cases.bad_models_and_options, stage=stage)
    expected = [
        ("no trainable parameter", "requires_grad"),
        ("'weight'", "meta"),
        ("str", "torch.optim.Optimizer"),
        ("not this rank's pieces",),
        ("torch.nn.Module", "'a model'"),
        ("'weight'", "no shape yet"),
    ]
    if stage == "zero3":
        expected += [
            ("units[0]", "not a module of the model"),
            ("'blocks.0'", "'blocks.0.up'", "overlap"),
            ("units[0]", "units[1]", "overlap"),
            ("units[0]", "'blocks.0'", "str"),
            ("'blocks'", "ModuleList", "entries"),
            ("units must be a list", "int"),
            ("prefetch", "-1"),
        ]
    else:
        expected += [("bucket_mb", "-1"), ("bucket_mb", "'25'")]
    expected += [("sharded by another engine",), ("SGD", "cannot be called"), ("mesh.get_group", "list")]
    expected += [("Adafactor", "AdamW"), ("DistributedDataParallel", ".module"), ("'0'", "sparse=False")]
    expected += [("param_dtype", "torch.int8"), ("reduce_dtype", "'bf16'"), ("find_unused", "'yes'")]
    for messages in answers:
        assert len(messages) == len(expected)
        for message, words in zip(messages, expected):
            for word in words:
                assert word in message, (word, message)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(ranks, stage):
    answers = ranks(3).run(cases.wrong_on_one_rank, stage=stage)
    for rank, (first, second, third) in enumerate(answers):
        assert ("trainable" if rank == 1 else "[1]") in first
        assert "[1, 2]" in second and "model" in second
        assert "[1, 2]" in third and "model" in third and "options" in third


@pytest.mark.parametrize("stage", parts.STAGES)
def test_other_options_on_one_rank_are_an_error_on_all(ranks, stage):
    assert min(ranks(3).run(cases.other_options_on_one_rank, stage=stage)) >= 7


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_parameter_without_gradient_is_named(ranks, world_size, stage):
    for message in ranks(world_size).run(cases.no_gradient, stage=stage):
        assert "requires_grad_(False)" in message


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize(
    "stage, options",
    [*((stage, options) for stage in parts.STAGES for options in ({}, {"find_unused": True})),
     ("zero2", {"bucket_mb": 0})],  # some buckets reduced when it stops, some not
    ids=str,
)  # fmt: skip
def test_faults_in_a_step_reach_the_caller_and_training_goes_on(ranks, world_size, stage, options):
    ranks(world_size).run(cases.faults_in_a_step, stage=stage, options=options)


@pytest.mark.parametrize("world_size", (1, 2))
def test_looking_at_freed_weights_is_an_error_and_no_crash(ranks, world_size):
    ranks(world_size).run(cases.looking_at_freed_weights)


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_freeing_gives_the_storage_back(ranks, world_size):
    ranks(world_size).run(cases.the_storage_is_what_is_freed)


@pytest.mark.parametrize("world_size", (2, 3))
def test_default_units_hold_nested_containers(ranks, world_size):
    for names in ranks(world_size).run(cases.nested_containers):
        # the block that stands in two containers is one unit, which runs twice
        assert names == ["towers.0.0", "towers.0.1", "towers.1", "tail.1"]


@pytest.mark.parametrize("stage", parts.STAGES.values(), ids=parts.STAGES)
def test_no_process_group(stage):
    with pytest.raises(RuntimeError, match="init_process_group"):
        stage(parts.seeded(parts.OddModel), parts.OPTIMIZERS["adamw"])


@pytest.mark.parametrize(
    "backend, device, ranks_here, gpus, expected",
    (
        ("auto", "auto", 2, 0, "gloo cpu"),
        ("auto", "auto", 2, 8, "nccl cuda:1"),
        ("auto", "auto", 8, 8, "nccl cuda:1"),
        ("auto", "auto", 2, 1, "gloo cuda:0"),
        ("auto", "auto", 1, 1, "nccl cuda:1"),
        ("gloo", "auto", 2, 2, "gloo cuda:1"),
        ("auto", "cpu", 2, 8, "gloo cpu"),
        ("nccl", "auto", 2, 1, ("2 NCCL ranks", "1 GPU", "--backend gloo")),
        ("nccl", "auto", 9, 8, ("9 NCCL ranks", "8 GPU")),
        ("nccl", "auto", 2, 0, ("needs GPUs", "--backend gloo")),
        ("nccl", "cpu", 2, 8, ("needs GPUs", "--device cpu")),
        ("auto", "cuda", 2, 0, ("no GPU", "--device cpu")),
        ("mpi", "auto", 2, 0, ("mpi", "auto, gloo or nccl")),
        ("auto", "tpu", 2, 0, ("tpu", "auto, cpu or cuda")),
    ),
)
def test_choice_of_backend_and_device(backend, device, ranks_here, gpus, expected):
    if isinstance(expected, str):
        assert " ".join(process_group.choose(backend, device, 1, ranks_here, gpus)[:2]) == expected
    else:
        with pytest.raises(ValueError) as raised:
            process_group.choose(backend, device, 1, ranks_here, gpus)
        assert all(words in str(raised.value) for words in expected)


def test_the_reason_says_whether_ranks_share_a_gpu():
    for ranks, gpus, shared in ((2, 1, True), (5, 4, True), (2, 2, False), (2, 4, False)):
        why = process_group.choose("gloo", "auto", 0, ranks, gpus)[2]
        assert ("share" in why) == shared and str(ranks) in why and str(gpus) in why and "slow" in why, why


def test_tf32_is_what_torch_says(monkeypatch):
    """Also what a container has set, by a variable that torch reads when it is imported."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    assert not process_group.tf32()
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert process_group.tf32()


def test_how_many_ranks_when_nobody_says():
    assert process_group.default_ranks("auto", "auto", gpus=0, machines=1) == 2
    assert process_group.default_ranks("auto", "auto", gpus=1, machines=1) == 2
    assert process_group.default_ranks("nccl", "auto", gpus=1, machines=1) == 1
    assert process_group.default_ranks("auto", "auto", gpus=1, machines=4) == 1
    assert process_group.default_ranks("auto", "auto", gpus=8, machines=1) == 8
    assert process_group.default_ranks("auto", "cpu", gpus=8, machines=1) == 2
