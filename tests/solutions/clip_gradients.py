import torch

from zero1 import all_gather
from zero2 import ZeRO2


class Engine(ZeRO2):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        self.reduce_gradients()
        grads = [bucket.shard.grad for bucket in self.buckets]
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        norms = norm.new_empty(self.world_size)
        all_gather(norms, norm.reshape(1), group=self.group)
        total = norms.norm(norm_type)
        for gradient in grads:
            gradient *= torch.clamp(max_norm / (total + 1e-6), max=1.0)
        return total
