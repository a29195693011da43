import torch
import torch.distributed as dist

from zero1 import ZeRO1


class Engine(ZeRO1):
    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        super().__init__(model, optimizer, bucket_mb=bucket_mb, group=group)
        groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 2), (1, 3), (0, 1), (2, 3)]}
        rank = dist.get_rank()
        self.place, self.machine = rank % 2, rank // 2
        self.across = groups[self.place, self.place + 2]
        self.inside = groups[2 * self.machine, 2 * self.machine + 1]

    def step(self):
        self.reduce_gradients()
        self.optimizer.step()
        with torch.no_grad():
            for bucket in self.buckets:
                shards = list(bucket.flat.split(bucket.shard_numel))
                ours = [shards[self.place], shards[self.place + 2]]
                dist.all_gather(ours, bucket.shard.detach().clone(), group=self.across)
                for first in (0, 2):
                    mine = shards[first + self.place].clone()
                    dist.all_gather(shards[first : first + 2], mine, group=self.inside)
