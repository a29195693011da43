"""Parameters that are never cut, for optimizers that look at whole matrices, and several optimizers in one engine."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import MOMENTUM, Blocks, Frozen, Tied, batch, different_on_ranks, mse, own_batch, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from conformance.pair import Pair
from conformance.test_meta import fill, on_meta
from conformance.test_precision import batch_with_overflow, mse_in_float64, scaled_step
from conformance.test_unused import Choices, choices_of, chosen_loss
from zerolab.engine import GradScaler, checkpoint

pytestmark = pytest.mark.stages("zero1", "zero2", "zero3")
ROUNDING = 1e-10


class ExactMuon(torch.optim.Optimizer):
    """Muon that computes in its parameters' dtype. torch's computes in bfloat16, which hides small mistakes."""

    def __init__(self, params, lr=0.02, momentum=0.9, decay=0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                assert param.ndim == 2, f"a parameter of shape {tuple(param.shape)}"
                buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                x = buffer / (buffer.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
                param.mul_(1 - group["lr"] * group["decay"]).sub_(x, alpha=group["lr"])


def matrices(model):
    """The matrices of the blocks, as users of Muon choose them."""
    return [param for param in model.blocks.parameters() if param.requires_grad and param.ndim == 2]


def rest(model):
    chosen = set(matrices(model))
    return [param for param in model.parameters() if param.requires_grad and param not in chosen]


def muon_and_adamw(model, muon=ExactMuon):
    adamw = torch.optim.AdamW([{"params": rest(model)[:1], "lr": 0.02}, {"params": rest(model)[1:]}], lr=0.01)
    return [muon(matrices(model)), adamw]


def itself(model):
    return model


OPTIONS = {
    "all parameters": {"whole": True},
    "only the matrices": {"whole": "matrices"},
    "tiny buckets": {"whole": "matrices", "bucket_mb": 0},
    "mixed precision": {"whole": True, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float64},
    "offload": {"whole": "matrices", "offload_policy": CPUOffloadPolicy()},
}


def whole_pair(engine, model=Blocks, make_optimizer=muon_and_adamw, whole="matrices", **options):
    """A `Pair` in which the engine gets a list of its own model's parameters."""
    plain = seeded(model)
    start = different_on_ranks(plain) if dist.get_rank() else copy.deepcopy(plain)
    if whole == "matrices":
        whole = matrices(start)
    if engine.like == "zero3":
        options.pop("bucket_mb", None)
    options = {"groups": itself, "tolerance": ROUNDING, **options}
    return Pair(engine, plain, make_optimizer, start=start, whole=whole, **options)


def train_with_everything(pair):
    """Micro-batches, a second reduced backward, clipping, and rates that change."""
    for step in range(3):
        pair.backward(3 * step, quiet=step % 2 == 0)
        pair.backward(3 * step + 1)
        pair.backward(3 * step + 2)
        pair.clip(0.5)
        for optimizer in (*pair.optimizer, *pair.trained.optimizers):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        pair.step()
    pair.check_weights()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_muon_for_the_matrices_and_adamw_for_the_rest(engine, options):
    """Norms and weights match one process, in which each optimizer has whole gradients."""
    train_with_everything(whole_pair(engine, loss=mse_in_float64, **OPTIONS[options]))


@pytest.mark.parametrize("model", ["Tied", "Frozen"])
def test_other_models(engine, model):
    """Tied weights belong to the root, and frozen parameters are cut, although `whole` is for all."""
    train_with_everything(whole_pair(engine, {"Tied": Tied, "Frozen": Frozen}[model], whole=True))


@pytest.mark.ranks(4)
def test_replicas(engine):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    train_with_everything(whole_pair(engine, group=mesh))


@pytest.mark.ranks(3)
def test_what_no_rank_used_is_left_out_of_the_step(engine):
    """With `find_unused`, Muon neither decays nor moves a matrix without a gradient."""
    pair = whole_pair(engine, Choices, data=choices_of, loss=chosen_loss, find_unused=True)
    pair.train(6)


def test_a_step_with_an_overflow_is_skipped_by_all_optimizers(engine):
    pair = whole_pair(engine, data=batch_with_overflow)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        scaled_step(pair, scaler, step, max_norm=0.1 if step % 2 else None, skipped=step == 2)
    pair.check_weights()
    assert scaler.get_scale() == 2.0**11


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["Adafactor", "Adagrad"])
def test_states_of_other_shapes_and_from_the_constructor(engine, kind):
    """Adafactor keeps means of rows and columns. Adagrad has whole states when the engine takes over."""
    make = getattr(torch.optim, kind)
    whole_pair(engine, make_optimizer=lambda model: make(model.parameters(), lr=0.02), whole=True).train(4)


@pytest.mark.stages("zero3")
def test_a_model_on_meta(engine):
    """The list has parameters of the model on meta. They are the same objects afterwards."""
    plain = seeded(Blocks, dtype=torch.float32)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            fill(name, param)
    start = on_meta(Blocks)
    options = {"data": partial(batch, dtype=torch.float32), "tolerance": 1e-5, "init_fn": fill}
    Pair(engine, plain, muon_and_adamw, groups=itself, start=start, whole=matrices(start), **options).train()


def test_torchs_muon_equals_ddp_to_the_bit(engine):
    """On two ranks, because the sum of two gradients does not depend on the order.

    All matrices are contiguous. Otherwise DDP's would have another layout in memory, and products round differently.
    """
    float_batch = partial(own_batch, dtype=torch.float32)
    model = seeded(Blocks, dtype=torch.float32)
    for block in model.blocks:
        block.down = nn.Parameter(block.down.detach().contiguous())
    under_ddp = DistributedDataParallel(copy.deepcopy(model))
    optimizers = muon_and_adamw(under_ddp.module, torch.optim.Muon)
    trained = engine(model, muon_and_adamw(model, torch.optim.Muon), whole=True)
    for step in range(4):
        loss, expected = mse(trained, *float_batch(step)), mse(under_ddp, *float_batch(step))
        assert torch.equal(loss, expected), f"the loss of step {step}"
        loss.backward()
        expected.backward()
        trained.step()
        trained.zero_grad()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = trained.full_state_dict()
    for name, weight in under_ddp.module.state_dict().items():
        assert torch.equal(found[name], weight), name


def elements_of_state(trained):
    """The elements of this rank's momentum, of every rank."""
    momenta = [state["momentum_buffer"] for state in trained.optimizer.state.values()]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, sum(momentum.numel() for momentum in momenta))
    return found


@pytest.mark.ranks(3)
def test_the_state_is_balanced_over_all_buckets(engine):
    """A bucket of one or two parameters cannot be balanced by itself, so the next one makes up for it."""
    model = seeded(Blocks, 8)
    options = {"bucket_mb": 0}
    if engine.like == "zero3":
        options = {"units": [module for module in model.modules() if isinstance(module, nn.Linear)]}
    trained = engine(model, MOMENTUM(model.parameters()), whole=True, **options)
    mse(trained, *own_batch(0)).backward()
    trained.step()
    loads = elements_of_state(trained)
    sizes = [param.numel() for param in model.parameters()]
    assert sum(loads) == sum(sizes), "an element has several owners, or none"
    assert max(loads) - min(loads) <= max(sizes), f"elements of state on each rank: {loads}"


class OneMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 3, bias=False)])

    def forward(self, tokens):
        return self.blocks[0](tokens.to(self.blocks[0].weight.dtype))


@pytest.mark.ranks(3)
def test_a_rank_may_own_nothing(engine, tmp_path):
    """A single matrix has one owner. The others step an optimizer with an empty group, and clip by the same norm.

    They also save and load, and schedule an empty group.
    """
    pair = whole_pair(engine, OneMatrix, lambda model: [ExactMuon(model.parameters())], whole=True)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (*pair.optimizer, pair.trained.optimizer)
    ]
    for step in range(4):
        pair.backward(step)
        pair.clip(0.01)
        pair.step()
        for schedule in schedules:
            schedule.step()
        if step == 1:
            checkpoint.save(pair.trained, tmp_path)
            checkpoint.load(pair.trained, tmp_path)
    pair.check_weights()
    assert sorted(elements_of_state(pair.trained)) == [0, 0, 18]


WRONG = {  # what `whole` is on one rank: the message
    "not given": "Muon looks at whole tensors, and blocks.0.down",
    "one is missing": "pass whole=True",
    "not a list": "whole must be True, False or a list",
    "of another model": "1 of the parameters in whole are not the model's",
    "another list": "rank.*whole",
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(engine, case):
    """On every rank, also if only one rank has it."""
    model = seeded(Blocks)
    wrong = {
        "not given": False,
        "one is missing": matrices(model)[1:],
        "not a list": model.head.weight,
        "of another model": [nn.Parameter(torch.ones(2, 2))],
        "another list": matrices(model),
    }
    whole = wrong[case] if dist.get_rank() == 1 else True
    with pytest.raises((ValueError, TypeError), match=WRONG[case]):
        engine(model, muon_and_adamw(model, torch.optim.Muon), whole=whole)


def test_each_parameter_is_in_one_optimizer(engine):
    model = seeded(Blocks)
    both = [MOMENTUM(model.parameters()), MOMENTUM(model.head.parameters())]
    with pytest.raises(ValueError, match="'head.weight'.* in two optimizers"):
        engine(model, both)
    with pytest.raises(ValueError, match="not in the optimizer"):
        engine(model, [MOMENTUM(model.head.parameters()), MOMENTUM(model.embedding.parameters())])
    with pytest.raises(ValueError, match="not in the optimizer"):
        engine(model, [])


@pytest.mark.stages("zero1")
@pytest.mark.ranks(3)
def test_default_buckets_have_a_matrix_for_each_rank(engine):
    """Matrices of 12 MiB. Two fit into the usual limit of 25 MiB, and the third rank would have padding only."""
    model = nn.Sequential(*[nn.Linear(1024, 3072, bias=False) for _ in range(18)])
    trained = engine(model, MOMENTUM(model.parameters()), whole=True)
    assert [len(bucket.params) for bucket in trained.buckets] == [3] * 6
    assert {bucket.numel for bucket in trained.buckets} == {3 * 1024 * 3072}, "padding"
