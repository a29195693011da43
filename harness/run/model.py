"""The one model of the project: a decoder-only GPT on bytes, from a laptop's size to 70B."""

import zlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT: `layers` blocks of width `width` over `vocab` tokens, at most `seq` positions."""

    layers: int
    width: int
    heads: int
    vocab: int = 256
    seq: int = 128


# `tiny` is for two CPU cores. `7b` (34 blocks of width 4096, 6.986e9 parameters) and `70b` (86 blocks of width 8192,
# 69.81e9) are GPTs with as many parameters as the articles speak of. They are no published model: Llama-3 70B, which an
# article names, has 80 blocks, grouped attention and a wider MLP, so its activations are others.
PRESETS = {
    "toy": GPTConfig(layers=2, width=32, heads=2, seq=32),
    "tiny": GPTConfig(layers=6, width=256, heads=4, seq=128),
    "small": GPTConfig(layers=12, width=768, heads=12, seq=512),
    "medium": GPTConfig(layers=24, width=1024, heads=16, seq=1024),
    "1b": GPTConfig(layers=20, width=2048, heads=16, vocab=32_000, seq=2048),
    "7b": GPTConfig(layers=34, width=4096, heads=32, vocab=32_000, seq=2048),
    "70b": GPTConfig(layers=86, width=8192, heads=64, vocab=64_000, seq=2048),
}


class Block(nn.Module):
    """A pre-norm transformer block: (batch, seq, width) -> the same."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (batch, seq) int64 -> logits (batch, seq, vocab). Embedding and head share one weight.

    The weights follow from `seed` alone, see `initialize`; on the meta device there are none.
    """

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for name, param in self.named_parameters():
            if not param.is_meta:
                initialize(name, param.data, seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seq = tokens.shape[1]
        if seq > self.config.seq:
            raise ValueError(f"a sequence of {seq} tokens, but this GPT has {self.config.seq} positions")
        x = self.tokens(tokens) + self.positions(torch.arange(seq, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initialize(name: str, tensor: torch.Tensor, seed: int = 0) -> None:
    """Fill the GPT's parameter `name` in place: biases 0, norms 1, all else normal with deviation 0.02.

    Seeded per name: the same values in whatever order, on whatever device and rank the parameters are made, so
    `ZeRO3(model_on_meta, ..., init_fn=partial(initialize, seed=0))` starts from the weights of `GPT(config, seed=0)`.
    """
    if name.endswith("bias"):
        tensor.zero_()
    elif "norm" in name:
        tensor.fill_(1)
    else:
        # One number of 32 bits from both: the CPU's generator looks at no more of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        on_cpu = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        on_cpu.normal_(std=0.02, generator=generator)
        if on_cpu is not tensor:
            tensor.copy_(on_cpu)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats, at least in float32: logits (batch, seq, vocab), targets (batch, seq) -> 0-d."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bfloat16 has two or three digits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def preset(name: str) -> GPTConfig:
    """The named shape. Raises ValueError naming the presets there are."""
    if name not in PRESETS:
        meant = f" (is {name.strip().lower()!r} meant?)" * (name.strip().lower() in PRESETS)
        raise ValueError(f"no preset {name!r}{meant}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
