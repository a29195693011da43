"""ZeRO-2 in its own way: every parameter is padded and reduced by itself, and there is no class for a bucket."""

import torch
import torch.distributed as dist

# Before torch 2.13 they had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ZeRO2:
    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        (options,) = optimizer.param_groups
        if len(options["params"]) != len({param for param in model.parameters() if param.requires_grad}):
            raise ValueError("the optimizer must have the model's parameters in one group")
        self.model, self.optimizer, self.group = model, optimizer, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.names, self.shards, self.whole, self.flying = {}, {}, {}, []
        for tensor in [*model.buffers(), *model.parameters()]:
            if tensor.layout is torch.strided and tensor.numel():
                values = tensor.detach().contiguous()
                dist.broadcast(values.view(-1).view(torch.uint8), group_src=0, group=group)
                tensor.data = values
        for name, param in model.named_parameters():
            if param.requires_grad:
                self.names[param] = name
                self.add(param)
        options["params"][:] = self.shards.values()
        self.order = list(self.names)[::-1]
        self.zero_grad()

    def add(self, param):
        size = -(-max(1, param.numel()) // self.world_size)
        whole = param.new_zeros(size * self.world_size, requires_grad=False)
        whole[: param.numel()] = param.detach().reshape(-1)
        param.data = whole[: param.numel()].view(param.shape)
        self.whole[param] = whole
        self.shards[param] = whole[self.rank * size : (self.rank + 1) * size]
        param.register_post_accumulate_grad_hook(self.arrived)

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        loss = loss_fn(self(inputs), targets)
        loss.backward()
        self.step()
        self.zero_grad()
        return loss.detach()

    def arrived(self, param):
        if param.grad.is_sparse:
            raise RuntimeError(f"the gradient of {self.names[param]} is sparse")
        if len(self.done) == len(self.order):
            self.done = set()
        if param in self.waiting or param in self.done:
            raise RuntimeError(f"a second gradient of {self.names[param]}: an earlier backward left out parameters")
        whole = torch.zeros_like(self.whole[param])
        whole[: param.numel()] = param.grad.reshape(-1)
        param.grad = None
        self.waiting[param] = whole
        while len(self.done) < len(self.order) and self.order[len(self.done)] in self.waiting:
            following = self.order[len(self.done)]
            self.done.add(following)
            self.land()
            shard = torch.empty_like(self.shards[following])
            whole = self.waiting.pop(following)
            work = reduce_scatter(shard, whole, group=self.group, async_op=True)
            self.flying.append((following, shard, whole, work))

    def land(self):
        while self.flying:
            param, shard, _, work = self.flying.pop()
            work.wait()
            shard /= self.world_size
            own = self.shards[param]
            own.grad = shard if own.grad is None else own.grad + shard

    def reduce_gradients(self):
        self.land()
        missing = [self.names[param] for param in self.order if param not in self.done]
        if missing:
            raise RuntimeError(f"no gradient for {missing}")

    def step(self):
        self.reduce_gradients()
        self.optimizer.step()
        for param, whole in self.whole.items():
            all_gather(whole, self.shards[param], group=self.group)
            torch.autograd.graph.increment_version(param)

    def zero_grad(self):
        self.land()
        self.waiting, self.done = {}, set()
        for shard in self.shards.values():
            shard.grad = None
        for param in self.names:
            param.grad = None
