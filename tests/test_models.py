"""Models of transformers, in their smallest configurations, train as one process: every engine, and every chapter.

Takes minutes, so it runs only with `-m long`. Skipped where transformers is not installed.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from helpers import MOMENTUM, different_on_ranks, on_every_rank, same, seeded, whole_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3
from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*of the model is in no unit")]

CLOSE = 1e-10  # float64 rounds at 1e-16. The order of sums differs between one process and N.
CLOSE_IN_FLOAT32 = 1e-8  # where `InFloat64` does not reach, because backward runs the layers again outside of it


class InFloat64(TorchFunctionMode):
    """Inside, nothing is computed in float32. Most of these models use float32 in norms, attention and losses."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = tree_map(double, (args, kwargs or {}))
        return function(*args, **kwargs)


def double(value):
    return torch.float64 if value is torch.float32 else value


SIZES = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 17}
LLAMA = SIZES | {"intermediate_size": 20, "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 16}


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=12, n_layer=3, n_head=2, vocab_size=17, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def llama_recomputed():
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def mixtral():
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=5, num_experts_per_tok=1)
    config._experts_implementation = "eager"  # grouped products are not there in float64
    return transformers.MixtralForCausalLM(config)


def t5():
    """Its blocks return tuples, and the position bias of the first block is passed through all of them."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=12, d_kv=6, d_ff=20, num_layers=2, num_decoder_layers=3, num_heads=2, vocab_size=17, dropout_rate=0
        )
    )


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def lora():
    """A frozen Llama with trained matrices next to its projections."""
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return model


MODELS = [gpt2, llama_recomputed, mixtral, t5, lora]


def inputs_of(make, step, rank):
    draws = torch.Generator().manual_seed(1000 * step + rank)
    inputs = {"input_ids": torch.randint(17, (2, 7), generator=draws)}
    if make is t5:
        inputs["decoder_input_ids"] = torch.randint(17, (2, 5), generator=draws)
    return inputs


def forward_and_backward(make, model, inputs):
    """Returns the loss, detached."""
    with nullcontext() if make is llama_recomputed else InFloat64():
        logits = model(**inputs).logits
        target = torch.linspace(-1, 1, logits[0].numel(), dtype=logits.dtype).view(logits[0].shape)
        loss = (logits - target).square().mean()
    loss.backward()
    return loss.detach()


def trains_as_one_process(stage, make, **options):
    model = seeded(make)
    plain, mine = copy.deepcopy(model), different_on_ranks(model)
    close = CLOSE_IN_FLOAT32 if make is llama_recomputed else CLOSE
    if hasattr(mine, "tie_weights"):
        mine.tie_weights()
    optimizers = [MOMENTUM([p for p in each.parameters() if p.requires_grad]) for each in (plain, mine)]
    engine = stage(mine, optimizers[1], **options)
    ranks = range(dist.get_world_size())
    start = [param.detach().clone() for param in plain.parameters()]
    for step in range(3):
        batches = [inputs_of(make, step, rank) for rank in ranks]
        together = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        expected = forward_and_backward(make, plain, together)
        optimizers[0].step()
        optimizers[0].zero_grad()
        loss = forward_and_backward(make, engine, batches[dist.get_rank()])
        engine.step()
        engine.zero_grad()
        dist.all_reduce(loss)
        same(loss / len(ranks), expected, close, f"mean of the ranks' losses in step {step}")
    weights = whole_weights(engine)
    moved = 0
    for (name, expected), before in zip(plain.named_parameters(), start):
        same(weights[name], expected.detach(), close, f"the weight {name}")
        moved += (expected.detach() - before).abs().sum().item()
    assert moved > 1e-3, "the model has hardly trained, so nothing was compared"


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("stage", [ZeRO1Engine, ZeRO2Engine, ZeRO3Engine])
@on_every_rank
def test_engines(ranks, stage, make):
    options = {"find_unused": True} if make is mixtral else {}
    trains_as_one_process(stage, make, **options)


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("make", [each for each in MODELS if each is not mixtral])
@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
@on_every_rank
def test_chapters(ranks, stage, make):
    trains_as_one_process(stage, make)
