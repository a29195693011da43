"""`./launch.sh conform` on engines of files: one that is correct, and others that are wrong, refuse, crash, or hang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# ZeRO-1, as a reader of docs/your-engine.md might write it.
CORRECT = """
import torch
import torch.distributed as dist


class MyZeRO1:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        (group,) = optimizer.param_groups
        self.buckets = []
        for dtype in dict.fromkeys(p.dtype for p in model.parameters() if p.requires_grad):
            self.buckets.append(Flat([p for p in model.parameters() if p.requires_grad and p.dtype == dtype]))
        for tensor in [*model.buffers(), *[p for p in model.parameters() if not p.requires_grad]]:
            if tensor.layout is torch.strided:
                whole = tensor.data.contiguous()
                dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
                if tensor.numel() == 1 or 0 not in tensor.stride():
                    tensor.data.copy_(whole)
        group["params"][:] = [bucket.shard for bucket in self.buckets]

    def __call__(self, *inputs, **named):
        return self.model(*inputs, **named)

    def step(self):
        for bucket in self.buckets:
            dist.all_reduce(bucket.gradients)
            bucket.gradients /= dist.get_world_size()
            bucket.shard.grad = bucket.gradients[bucket.own]
        self.optimizer.step()
        for bucket in self.buckets:
            dist.all_gather_single(bucket.weights, bucket.shard)

    def zero_grad(self):
        for bucket in self.buckets:
            bucket.gradients.zero_()

    def full_state_dict(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


class Flat:
    def __init__(self, params):
        size = -(-sum(p.numel() for p in params) // dist.get_world_size())
        self.own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        self.weights = torch.zeros(size * dist.get_world_size(), dtype=params[0].dtype)
        self.gradients = torch.zeros_like(self.weights)
        start = 0
        for param in params:
            place = slice(start, start + param.numel())
            self.weights[place] = param.detach().flatten()
            param.data = self.weights[place].view(param.shape)
            param.grad = self.gradients[place].view(param.shape)  # autograd adds to it in place
            start += param.numel()
        dist.broadcast(self.weights, src=0)
        self.shard = self.weights[self.own]


def build(model, optimizer, device):
    return MyZeRO1(model, optimizer)
"""
REDUCE = "            dist.all_reduce(bucket.gradients)\n"
MEAN = "            bucket.gradients /= dist.get_world_size()\n"
STEP = "        self.optimizer.step()\n"
LOW = """\
            low = bucket.gradients.bfloat16()
            dist.all_reduce(low)
            bucket.gradients.copy_(low)
"""
# {name: (what is replaced, by what, the outcome)}
OTHERS = {
    "sums": (MEAN, "", "wrong"),
    "no_decay": (STEP, "        self.optimizer.param_groups[0]['weight_decay'] = 0\n" + STEP, "wrong"),
    "rate": (STEP, "        self.optimizer.param_groups[0]['lr'] *= 1.00001\n" + STEP, "wrong"),
    "low": (REDUCE, LOW, "wrong"),
    "left_out": ("if p.requires_grad and p.dtype == dtype]", "if p.requires_grad and p.dtype == dtype][1:]", "wrong"),
    "no_gather": ("            dist.all_gather_single(bucket.weights, bucket.shard)\n", "            pass\n", "wrong"),
    "refuses": (STEP, STEP + "        raise TypeError('not today')\n", "refused"),
    "trips": (STEP, STEP + "        None + 1\n", "crash"),
    "dies": (STEP, STEP + "        __import__('os')._exit(3)\n", "crash"),
    "hangs": (REDUCE, "            if dist.get_rank() == 0:\n    " + REDUCE, "hang"),
}


def conform(tmp_path, *arguments):
    """The finished process, and what it wrote."""
    command = [
        sys.executable,
        "-m",
        "tests.conformance.command",
        *map(str, arguments),
        "--json",
        tmp_path / "found.json",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return run, json.loads((tmp_path / "found.json").read_text())


def files(tmp_path, *names):
    """The engines' files."""
    (tmp_path / "correct.py").write_text(CORRECT)
    for name in names:
        old, new, _ = OTHERS[name]
        assert old in CORRECT
        (tmp_path / f"{name}.py").write_text(CORRECT.replace(old, new))
    return [tmp_path / f"{name}.py" for name in names]


@pytest.mark.long
def test_outcomes_are_told_apart_and_the_other_engines_go_on(tmp_path):
    """Each wrong engine is found by one test of values; the exit status is 1."""
    run, found = conform(tmp_path, *files(tmp_path, *OTHERS), "--only", "trains_as_one_process and Blocks")
    assert run.returncode == 1, run.stdout + run.stderr
    for name, (_, _, outcome) in OTHERS.items():
        ((test, verdict),) = found["engines"][name].items()
        assert (test, verdict["outcome"]) == ("values::trains_as_one_process", outcome), (name, verdict)
    assert "TypeError: not today" in run.stdout and "1e-12 is allowed" in run.stdout


@pytest.mark.long
def test_correct_and_refusing_engines_end_with_status_0(tmp_path):
    """The table has a line for each test, and the reason where one does not apply."""
    names = [*files(tmp_path, "refuses"), tmp_path / "correct.py", "zero2.py"]
    run, found = conform(tmp_path, *names, "--only", "training_step or bucket")
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["engines"]["correct"]["values::training_step_is_the_loop"]["outcome"] == "correct"
    assert found["engines"]["refuses"]["values::training_step_is_the_loop"]["outcome"] == "refused"
    assert "the chapter does not promise it" in run.stdout and "in all: refused" in run.stdout


@pytest.mark.long
def test_a_correct_engine_of_one_page_passes_all_that_applies(tmp_path):
    """Nothing is wrong with it, and where it documents nothing the test does not apply."""
    files(tmp_path)
    run, found = conform(tmp_path, tmp_path / "correct.py")
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = [verdict["outcome"] for verdict in found["engines"]["correct"].values()]
    assert outcomes.count("correct") >= 15, run.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [(["9"], "N must be 1 to 8"), (["nobody"], "no engine 'nobody'"), (["missing.py"], "missing.py")],
)
def test_a_mistake_is_one_line(arguments, message):
    """Nothing is started."""
    command = [sys.executable, "-m", "tests.conformance.command", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1 and message in run.stderr, run
