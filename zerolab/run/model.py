"""The one model of the project: a decoder-only GPT on bytes, from a laptop's size to 70B."""

import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from zerolab.run.command_line import did_you_mean


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT: `layers` blocks of width `width` over `vocab` tokens, at most `seq` positions.

    The rest is what published models have and this one by default has not. `kv_heads` (default: `heads`): heads of keys
    and values, each shared by heads / kv_heads heads of queries (grouped attention). `ffn` (default: 4 width): width
    inside the MLP. `gated`: the MLP is down(silu(gate(x)) * up(x)), as in Llama. `tied=False`: the head has a weight of
    its own. `bias=False`: linear layers and norms have none. Raises ValueError for heads that do not divide.
    """

    layers: int
    width: int
    heads: int
    vocab: int = 256
    seq: int = 128
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool = True
    bias: bool = True

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"the width must be a multiple of the heads, got width {self.width}, heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            got = f"got heads {self.heads}, kv-heads {self.kv_heads}"
            raise ValueError(f"the heads must be a multiple of the heads of keys and values, {got}")


PRESETS: dict[str, GPTConfig] = {}
for _name, _shape in tomllib.loads(Path(__file__).with_name("presets.toml").read_text()).items():
    PRESETS[_name] = GPTConfig(**_shape)


class Block(nn.Module):
    """A pre-norm transformer block: (batch, seq, width) -> the same."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width, bias = config.width, config.bias
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        inner = config.ffn or 4 * width
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, width + 2 * self.kv_heads * (width // self.heads), bias)
        self.proj = nn.Linear(width, width, bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, inner, bias)
        self.gate = nn.Linear(width, inner, bias) if config.gated else None
        self.down = nn.Linear(inner, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seq, -1, width // self.heads).transpose(1, 2)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        grouped = self.kv_heads != self.heads
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, width))
        normed = self.norm2(x)
        inner = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        return x + self.down(inner)


class GPT(nn.Module):
    """Tokens (batch, seq) int64 -> logits (batch, seq, vocab). Embedding and head share one weight, if `tied`.

    The weights follow only from `seed`: see `initialize`. On the meta device there are none.
    """

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
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

    Seeded per name: the same values in whatever order, on whatever device and rank the parameters are made. So
    `ZeRO3Engine(model_on_meta, ..., init_fn=partial(initialize, seed=0))` starts from the weights of
    `GPT(config, seed=0)`.
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


@torch.no_grad()
def sample(forward, prompt: bytes, length: int, config: GPTConfig, seed: int, device: torch.device) -> bytes:
    """The bytes that a GPT writes after `prompt`, drawn with `seed`. `forward` is the model, or an engine around it.

    All ranks of a sharded engine call it with the same arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        context = torch.tensor([tokens[-config.seq :]], device=device)
        logits = forward(context)[0, -1, :256].float().cpu()  # a larger vocabulary than bytes has is not trained
        tokens.append(torch.multinomial(logits.softmax(0), 1, generator=generator).item())
    return bytes(tokens[len(prompt) :])


def preset(name: str) -> GPTConfig:
    """The named shape. Raises ValueError naming the presets there are."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}{did_you_mean(name, PRESETS)} Use one of: {', '.join(PRESETS)}")
    return PRESETS[name]


def number_of_parameters(config: GPTConfig) -> int:
    """How many parameters a GPT of this shape has, counted on one without memory."""
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(config).parameters())
