import torch.distributed as dist

from zero1 import Bucket, ZeRO1, check_model, check_parameters, round_up


class WholeBucket(Bucket):
    def __init__(self, name, named_params, group, loads):
        self.loads = loads
        super().__init__(name, named_params, group)

    def assign_places(self):
        align = self.alignment()
        pairs = sorted(zip(self.names, self.params), key=lambda pair: -pair[1].numel())
        parts = [[] for _ in self.loads]
        ends = [0] * self.world_size
        for name, param in pairs:
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += param.numel()
            parts[owner].append((ends[owner], name, param))
            ends[owner] += round_up(param.numel(), align)
        self.shard_numel = max(*ends, align)
        self.numel = self.shard_numel * self.world_size
        self.mine = [param for _, _, param in parts[dist.get_rank(self.group)]]
        placed = [(rank * self.shard_numel + begin, name, param)
                  for rank, part in enumerate(parts) for begin, name, param in part]  # fmt: skip
        self.offsets, self.names, self.params = zip(*placed)


class Engine(ZeRO1):
    def check(self):
        check_model(self.model, self.group)
        check_parameters(self.model, self.optimizer)

    def partition(self, bucket_mb):
        self.loads = [0] * self.world_size
        return super().partition(bucket_mb)

    def make_bucket(self, name, named_params):
        return WholeBucket(name, named_params, self.group, self.loads)

    def take_over_optimizer(self):
        super().take_over_optimizer()
        (param_group,) = self.optimizer.param_groups
        param_group["params"][:] = [param for bucket in self.buckets for param in bucket.mine]
