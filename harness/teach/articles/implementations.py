"""Claims about the implementations: FSDP1 beside FSDP2, wrapping by size, and how much code the stages take."""

import ast
from functools import partial
from pathlib import Path

from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from harness.plan.events import COMPUTE, Collective
from harness.run.model import preset
from harness.teach.articles.claim import MULTIPLE_GPUS, NAMES, SCALING, Claim, holds_when, verdict
from harness.teach.articles.planned import H100
from harness.teach.articles.runs import SGD, Step, gpt, small_gpt, step

ROOT = Path(__file__).parents[3]
FROM = 10_000  # parameters from which the article's policy wraps


def adapted_gpt():
    """All frozen but the last matrix of each block's MLP, as fine-tuning freezes."""
    model = small_gpt()
    for name, param in model.named_parameters():
        param.requires_grad = "down.weight" in name
    return model


def fsdp1_beside_fsdp2() -> tuple[str, str]:
    """Bytes sent by a step, and the peak, of a whole model and of one that is mostly frozen."""
    whole, frozen = ([step(name, model) for name in ("fsdp1", "fsdp2")] for model in (small_gpt, adapted_gpt))

    def better(old: Step, new: Step) -> bool:
        return new.peak < 0.95 * old.peak or new.sent() < 0.95 * old.sent()

    measured = "; ".join(
        f"{what}: peak {old.peak / 1e6:.2f} and {new.peak / 1e6:.2f} MB, sent {old.sent():.2f}Ψ and {new.sent():.2f}Ψ"
        for what, (old, new) in (("all trained", whole), ("two thirds frozen", frozen))
    )
    condition = "a unit has frozen parameters: FSDP1 reduces gradients for its whole flat parameter"
    return f"{NAMES['fsdp1']} and {NAMES['fsdp2']}, {measured}", holds_when(condition, better(*frozen), better(*whole))


def units_by_size() -> tuple[str, str]:
    """Whether that costs time: gathers counted on a small GPT, and those of a block priced by the planner."""
    model = partial(gpt, "toy", layers=4, width=64, tied=False)
    blocks = step("fsdp1", model, optimizer_cls=SGD).count["all-gather"]
    policy = partial(size_based_auto_wrap_policy, min_num_params=FROM)
    layers = step("fsdp1", model, optimizer_cls=SGD, auto_wrap_policy=policy).count["all-gather"]

    def longer(name: str) -> float:
        """How many times as long the gathers of one block take in a node, by layers instead of as one."""
        width = preset(name).width
        sizes = [2 * times * width**2 for times in (3, 1, 4, 4)]  # bytes of its four matrices in bfloat16
        seconds = [
            H100.collective_seconds(Collective(COMPUTE, "all-gather", n, 8, 1, "")) for n in (*sizes, sum(sizes))
        ]
        return sum(seconds[:-1]) / seconds[-1]

    ratios = {name: longer(name) for name in ("7b", "small")}
    measured = (
        f"all-gathers of a step: {layers}, with a unit per block {blocks}; predicted time of a block's gathers, "
        "8 H100: " + ", ".join(f"width {preset(name).width:,} x{ratio:.2f}" for name, ratio in ratios.items())
    )
    return measured, holds_when("layers are large", *(ratio < 1.25 for ratio in ratios.values()))


def statements(file: str, name: str) -> int:
    """Statements of a class, without docstrings."""
    tree = ast.parse((ROOT / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(found)
    )


def complexity() -> tuple[str, str]:
    """Of what is written out in one class each; what the stages share in harness/engine is not counted."""
    numbers = {
        "a DDP of buckets and hooks": statements("harness/run/counterparts.py", "DDPStandIn"),
        **{NAMES[f"zero{n}"]: statements(f"zero{n}.py", f"ZeRO{n}") for n in (1, 2, 3)},
    }
    ddp, zero1, zero2, zero3 = numbers.values()
    measured = "statements: " + ", ".join(f"{name} {count}" for name, count in numbers.items())
    return measured, verdict(ddp < min(zero1, zero2) and max(zero1, zero2) < zero3)


CLAIMS = [
    Claim(MULTIPLE_GPUS, "FSDP1 is less optimized than FSDP2",
          "one step of each, a fake group of 8, bytes counted; no time was measured", fsdp1_beside_fsdp2),
    Claim(SCALING, "layers from 10,000 parameters on are units of their own (min_num_params)",
          "one step of FSDP1 with its policy, gathers counted and priced", units_by_size),
    Claim(SCALING, "implementation complexity: DDP low, ZeRO-1 and -2 medium, ZeRO-3 high",
          "statements of this project's classes counted", complexity),
]  # fmt: skip
