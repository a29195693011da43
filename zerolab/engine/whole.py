"""Whole parameters: no cut falls inside a parameter, so an optimizer may look at whole matrices.

A chapter cuts a bucket wherever its shards end. For AdamW this makes no difference, because it treats each element by
itself. Muon orthogonalizes a matrix, and Adafactor averages over its rows and columns. On a part of a matrix both
compute wrong results without an error. With `whole=True`, or a list of parameters, each of these parameters belongs to
one rank as a whole:

    cut      flat   aaaaaaaaaaaaaaabbbcccccccccddd    four parameters, three ranks
             owner  000000000011111111112222222222
    whole    flat   aaaaaaaaaaaaaaaccccccccc......bbbddd.........
             owner  000000000000000111111111111111222222222222222

The parameters of a bucket are divided into N parts. The largest parameter is placed first, and each parameter goes to
the part that has the fewest elements so far. The fullest part goes to the rank that owns the fewest elements of all
buckets so far. A shard is as large as the fullest part. Collectives stay the same. Whole and cut parameters have
separate buckets, because the cut ones must be stored without gaps.

The cost is padding: a bucket has N times as many elements as its fullest part. The padding is held in shards and
gradients, and sent, but the optimizer has no state for it. A bucket of one matrix is N times as large as the matrix, so
buckets are larger by default, and units should have many matrices (docs/whole-parameters.md has numbers). A rank may
own nothing of a bucket, or of the model.

Megatron also assigns whole matrices to ranks by their cost. nanochat groups matrices of one shape, and pads their
number to a multiple of N. FSDP2 shards rows, and for Muon torchtitan sends each matrix to one rank and back.
DeepSpeed's stages 1 and 2 cut matrices, gather the gradients, and repeat the work on every rank that has a part.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zero1 import round_up

NAMES = ("Muon", "Adafactor")  # of torch's optimizers that look at whole tensors


class WholeParameters:
    """The parameters that are never cut, and how many elements of them each rank owns.

    given    the option: True for all trained parameters, False for none, or a list of parameters
    params   the set of these parameters; empty before `check`
    """

    def __init__(self, given):
        is_list = hasattr(given, "__iter__") and not isinstance(given, torch.Tensor)
        self.given = list(given) if is_list else given
        self.params = set()
        self.loads = {}  # rank -> elements that it owns in the buckets so far

    def check(self, model, optimizers):
        """Raise an error if the option is wrong, or if an optimizer needs it. Chooses `params`."""
        trained = {param: name for name, param in model.named_parameters() if param.requires_grad}
        if isinstance(self.given, bool):
            self.params = set(trained) if self.given else set()
        elif isinstance(self.given, list) and all(isinstance(each, nn.Parameter) for each in self.given):
            foreign = set(self.given) - set(model.parameters())
            if foreign:
                raise ValueError(f"{len(foreign)} of the parameters in whole are not the model's")
            self.params = set(self.given) & set(trained)  # a frozen parameter has no optimizer, so it may be cut
        else:
            raise TypeError(f"whole must be True, False or a list of the model's parameters, got {self.given!r}")
        for param in self.params:
            if isinstance(param, DTensor):
                raise ValueError(
                    f"parameter {trained[param]!r} is split by tensor parallelism, so no rank has it whole: leave it "
                    "out of whole"
                )
        for optimizer in optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            names = [trained[param] for param in params if param in trained and param not in self.params]
            if type(optimizer).__name__ in NAMES and names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                raise ValueError(
                    f"{type(optimizer).__name__} looks at whole tensors, and {', '.join(names[:4])}{more} would be cut "
                    "between ranks: pass whole=True, or whole=[...] with all parameters of this optimizer"
                )

    def bucket_mb(self, engine):
        """The default size of a bucket in MiB. None, which is the chapter's default, if all parameters are cut.

        Else the chapter's limit of 25 MiB grows to N times the largest whole parameter, so that each rank gets one.
        """
        if not self.params:
            return None
        total = sum(param.nbytes for param in engine.model.parameters() if param.requires_grad)
        largest = max(param.nbytes for param in self.params)
        return min(max(25, engine.world_size * largest / 2**20), max(1, total / 6 / 2**20))

    def split(self, runs):
        """Split each list of (name, parameter) into the parameters that are cut and those that are whole."""
        result = []
        for run in runs:
            cut = [pair for pair in run if pair[1] not in self.params]
            whole = [pair for pair in run if pair[1] in self.params]
            result += [part for part in (cut, whole) if part]
        return result

    def assign_owners(self, named_params, world_size):
        """Choose an owner for each parameter of a bucket. Returns (named_params, owners), sorted by owner."""
        parts = [[] for _ in range(world_size)]
        for pair in sorted(named_params, key=numel, reverse=True):
            min(parts, key=size).append(pair)
        parts.sort(key=size, reverse=True)
        ranks = sorted(range(world_size), key=self.load)
        part_of = dict(zip(ranks, parts))
        for rank, part in part_of.items():
            self.loads[rank] = self.load(rank) + size(part)
        owners = [rank for rank in range(world_size) for _ in part_of[rank]]
        return [pair for rank in range(world_size) for pair in part_of[rank]], owners

    def load(self, rank):
        return self.loads.get(rank, 0)


def numel(pair):
    return pair[1].numel()


def size(part):
    return sum(map(numel, part))


def assign_places(bucket):
    """The chapter's `assign_places`, for a bucket whose parameters have owners: sets `offsets` and sizes."""
    align = bucket.alignment()
    ends = [0] * bucket.world_size  # the elements that each rank has so far
    begins = []
    for param, owner in zip(bucket.params, bucket.owners):
        begins.append(ends[owner])
        ends[owner] += round_up(param.numel(), align)
    bucket.shard_numel = max(*ends, align)
    bucket.numel = bucket.shard_numel * bucket.world_size
    bucket.offsets = [owner * bucket.shard_numel + begin for owner, begin in zip(bucket.owners, begins)]
