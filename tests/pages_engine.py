"""The engine that docs/your-engine.md prints, and variations of it that are wrong, or unusual and correct."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "your-engine.md").read_text()
LISTING = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE).group(1)

REDUCE = "        dist.all_reduce(self.gradients)\n"
MEAN = "        self.gradients /= self.world_size\n"
STEP = "        self.optimizer.step()\n"
FORWARD = "        return self.model(*inputs)\n"
OWN_OPTIMIZER = "        self.optimizer = optimizer\n"
SIZES = "[-(-p.numel() // 4) * 4 for p in self.params]"

# {name: (the listing's lines, what is there instead)}
WRONG = {
    "sums_and_does_not_average": (MEAN, ""),
    "reduces_in_float32": (
        REDUCE,
        "        low = self.gradients.float()\n        dist.all_reduce(low)\n        self.gradients.copy_(low)\n",
    ),
    "no_weight_decay": (OWN_OPTIMIZER, OWN_OPTIMIZER + "        optimizer.param_groups[0]['weight_decay'] = 0.0\n"),
    "rate_off_by_1e-5": (OWN_OPTIMIZER, OWN_OPTIMIZER + "        optimizer.param_groups[0]['lr'] *= 1 + 1e-5\n"),
    "leaves_out_a_bias": (MEAN, MEAN + "        self.params[-1].grad.zero_()\n"),
    "forgets_momentum": (STEP, STEP + "        self.optimizer.state.clear()\n"),
    "one_rank_does_not_count": (
        REDUCE,
        "        if dist.get_rank() == 1:\n            self.gradients.zero_()\n" + REDUCE,
    ),
    "keeps_the_last_micro_batch": (FORWARD, "        self.gradients.zero_()\n" + FORWARD),
}
CORRECT = {
    "gathers_and_adds_backwards": (
        REDUCE,
        "        parts = [torch.empty_like(self.gradients) for _ in range(self.world_size)]\n"
        "        dist.all_gather(parts, self.gradients)\n"
        "        self.gradients.copy_(sum(reversed(parts)))\n",
    ),
    "passes_gradients_around_a_ring": (
        REDUCE,
        "        rank, passed, total = dist.get_rank(), self.gradients.clone(), self.gradients.clone()\n"
        "        for _ in range(self.world_size - 1):\n"
        "            sending = dist.isend(passed, (rank + 1) % self.world_size)\n"
        "            received = torch.empty_like(passed)\n"
        "            dist.recv(received, (rank - 1) % self.world_size)\n"
        "            sending.wait()\n"
        "            total += received\n"
        "            passed = received\n"
        "        self.gradients.copy_(total)\n",
    ),
    "reduces_parameter_by_parameter": (
        REDUCE,
        "        for param in reversed(self.params):\n            dist.all_reduce(param.grad)\n",
    ),
    "splits_the_batch": (  # and adds in a different order than one backward
        FORWARD,
        FORWARD
        + """
    def training_step(self, inputs, targets, loss_fn):
        losses = []
        for part, wanted in zip(inputs.split(1), targets.split(1)):
            loss = loss_fn(self(part), wanted) * len(part) / len(inputs)
            loss.backward()
            losses.append(loss.detach())
        self.step()
        self.zero_grad()
        return torch.stack(losses).sum()
""",
    ),
    "keeps_buckets_of_its_own": (OWN_OPTIMIZER, OWN_OPTIMIZER + "        self.buckets = {'first': self.params}\n"),
    "does_not_align": (SIZES, "[p.numel() for p in self.params]"),
}


def changed(old: str, new: str) -> str:
    """The listing with `new` in place of `old`."""
    assert LISTING.count(old) == 1, f"docs/your-engine.md has no such lines: {old}"
    return LISTING.replace(old, new)
