"""Models of transformers, in their smallest configurations, train as one process: every engine, and every chapter.

Takes minutes, so it runs only with `-m long`. Skipped where transformers is not installed.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from conformance.pair import Pair
from conformance.subjects import subject
from helpers import on_every_rank, seeded
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

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
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) / 4)

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


def tokens_of(step, rank):
    return (torch.randint(17, (2, 7), generator=torch.Generator().manual_seed(1000 * step + rank)),)


def loss_of(make, model, tokens):
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]} if make is t5 else {"input_ids": tokens}
    with nullcontext() if make is llama_recomputed else InFloat64():
        logits = model(**inputs).logits
        target = torch.linspace(-1, 1, logits[0].numel(), dtype=logits.dtype).view(logits[0].shape)
        return (logits - target).square().mean()


CHAPTERS, ENGINES = ["zero1.py", "zero2.py", "zero3.py"], ["zero1", "zero2", "zero3"]
# A chapter needs a gradient for every parameter, and an expert may get none.
CASES = [(make, stage) for make in MODELS for stage in (ENGINES if make is mixtral else CHAPTERS + ENGINES)]


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("make, stage", CASES)
@on_every_rank
def test_trains_as_one_process(ranks, make, stage):
    options = {"find_unused": True} if make is mixtral else {}
    close = CLOSE_IN_FLOAT32 if make is llama_recomputed else CLOSE
    loss = partial(loss_of, make)
    Pair(subject(stage), seeded(make), data=tokens_of, loss=loss, tolerance=close, **options).train()
