import torch
import torch.distributed as dist

from zero2 import ZeRO2


class Engine(ZeRO2):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        self.reduce_gradients()
        own = torch.cat([bucket.shard.grad for bucket in self.buckets]).abs()
        if norm_type == float("inf"):
            norms = [torch.zeros((), dtype=own.dtype) for _ in range(self.world_size)]
            dist.all_gather(norms, own.max(), group=self.group)
            norm = torch.stack(norms).max()
        else:
            norm = own.pow(norm_type).sum()
            dist.all_reduce(norm, group=self.group)
            norm = norm ** (1 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        for bucket in self.buckets:
            bucket.shard.grad.mul_(scale)
        return norm
