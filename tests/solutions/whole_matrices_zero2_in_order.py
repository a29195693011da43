"""Over ZeRO-2. The parameters of a bucket keep their order: it is cut between two of them, near each N-th of it."""

import torch.distributed as dist

from zero1 import Bucket, check_model, check_parameters, round_up
from zero2 import ZeRO2


def size(part):
    return sum(param.numel() for _, param in part)


class Parts(Bucket):
    def __init__(self, name, named_params, group, owned):
        parts = [[] for _ in owned]
        seen = 0
        for pair in named_params:
            middle = seen + pair[1].numel() // 2
            parts[len(owned) * middle // max(1, size(named_params))].append(pair)
            seen += pair[1].numel()
        parts.sort(key=size)
        ranks = sorted(range(len(owned)), key=lambda rank: -owned[rank])
        self.parts = dict(sorted(zip(ranks, parts)))
        for rank, part in self.parts.items():
            owned[rank] += size(part)
        super().__init__(name, sum(self.parts.values(), []), group)

    def assign_places(self):
        align = self.alignment()
        rounded = {rank: [round_up(param.numel(), align) for _, param in part] for rank, part in self.parts.items()}
        self.shard_numel = max(align, *map(sum, rounded.values()))
        self.numel = self.shard_numel * self.world_size
        self.offsets = []
        for rank, sizes in rounded.items():
            self.offsets += [rank * self.shard_numel + sum(sizes[:index]) for index in range(len(sizes))]

    def pieces(self):
        """(the weight, its gradient or None) of every parameter of this rank: views of the shard and its gradient."""
        begin = 0
        for _, param in self.parts[dist.get_rank(self.group)]:
            place = slice(begin, begin + param.numel())
            gradient = None if self.shard.grad is None else self.shard.grad[place].view(param.shape)
            yield self.shard.detach()[place].view(param.shape), gradient
            begin += round_up(param.numel(), self.alignment())


class Engine(ZeRO2):
    def check(self):
        check_model(self.model, self.group)
        check_parameters(self.model, self.optimizer)

    def partition(self, bucket_mb):
        self.owned = [0] * self.world_size
        return super().partition(bucket_mb)

    def make_bucket(self, name, named_params):
        return Parts(name, named_params, self.group, self.owned)

    def take_over_optimizer(self):
        super().take_over_optimizer()
        (self.param_group,) = self.optimizer.param_groups
        self.param_group["params"][:] = [weight for bucket in self.buckets for weight, _ in bucket.pieces()]

    def hand_out_gradients(self):
        gradients = [gradient for bucket in self.buckets for _, gradient in bucket.pieces()]
        for weight, gradient in zip(self.param_group["params"], gradients):
            weight.grad = gradient

    def reduce_gradients(self):
        super().reduce_gradients()
        self.hand_out_gradients()

    def zero_grad(self):
        super().zero_grad()
        self.hand_out_gradients()
