"""An optimizer for matrices

Symptom: The losses differ from the second step on. Fewer bytes of parameters and gradients are held and sent.

Clue: The optimizer needs matrices, and an engine gives it flat pieces. What is in the matrix that it makes of a piece?

Hint: `EngineBucket.assign_places` in zerolab/engine/bucket.py, and the option that it looks at.

Answer: Muon replaces the momentum of a matrix by the nearest orthogonal matrix. A shard may end inside a matrix, and
this optimizer gives a flat piece its rows back, so each rank orthogonalizes its own rows. But the rows of an orthogonal
matrix are orthogonal to each other, so the result for some of the rows depends on all of them. With `whole=True`, or a
list of the matrices, each matrix belongs to one rank.

Unnoticed: Half of a matrix is a matrix, so nothing raises an error, and the loss falls. The engine refuses torch's Muon
without `whole=True`, but it knows it only by its name. In DeepSpeed, Muon saw gradients that were only partly reduced
(DeepSpeed#7807), and the tests only checked that the weights changed.

Read: zerolab/engine/whole.py; tests/conformance/test_whole_parameters.py, `ExactMuon`.
"""

import torch
from torch import nn

from zerolab.engine import ZeRO2Engine
from zerolab.teach.museum.loop import SHAPE, adamw

STAGE = "engines"
DIFFERS = {"losses", "parameters held", "gradients held", "optimizer held", "sent"}
CAUGHT_BY = "tests/conformance/test_whole_parameters.py::test_muon_for_the_matrices_and_adamw_for_the_rest"
STEPS = 6


class RowMuon(torch.optim.Optimizer):
    """Muon for parameters whose rows have `SHAPE.width` elements."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for piece in group["params"]:
                momentum = self.state[piece].setdefault("momentum", torch.zeros_like(piece))
                momentum.lerp_(piece.grad, 0.1)
                flat = momentum.flatten()  # pieces of an engine have lost their shape
                rows = nn.functional.pad(flat, (0, -len(flat) % SHAPE.width)).view(-1, SHAPE.width)
                update = orthogonalized(rows).flatten()[: len(flat)]
                piece.sub_(update.view(piece.shape), alpha=group["lr"])


def orthogonalized(matrix):
    """The Newton-Schulz iteration of Muon: all singular values become about 1."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def make_optimizer(params):
    matrices = [param for param in params if param.ndim == 2 and param.shape[1] == SHAPE.width]
    others = [param for param in params if all(param is not matrix for matrix in matrices)]
    return [RowMuon(matrices, {"lr": 3e-3}), adamw(others)]


class RowEngine(ZeRO2Engine):
    def __init__(self, model, optimizer, *, whole=False, **options):
        # The optimizer finds the rows by itself: why pad the buckets?
        super().__init__(model, optimizer, **options)


def build(model, optimizer, device):
    return RowEngine(model, optimizer, whole=True)


def correct(model, optimizer, device):
    return ZeRO2Engine(model, optimizer, whole=True)
