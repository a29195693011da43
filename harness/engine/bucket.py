"""What real training adds to a bucket: another dtype to compute in, replicas, the host's memory, tensor parallelism."""

import torch

import zero1
import zero2
from harness.engine import gradients
from harness.engine.options import precision
from harness.engine.options.tensor_parallel import local
from harness.engine.safety import guard
from harness.engine.safety.waiting import wait


class NamedWork:
    """A collective in flight. An error of its `wait` says what this rank has waited for."""

    def __init__(self, work, collective: str, bucket):
        self._work, self._collective, self._bucket = work, collective, bucket

    def wait(self) -> None:
        """On a CPU the host waits, on CUDA the stream."""
        wait(self._work, self._collective, self._bucket)


class EngineBucket(zero1.Bucket):
    """A bucket of an engine: frozen or trained parameters, in mixed precision, on replicas, in the host's memory.

    `sharded`: of ZeRO-3, whose `flat` is freed as soon as this rank has its shard. `source`: see `options/meta.py`.
    """

    def __init__(self, named_params, placement, dtypes, sharded: bool = False, source=None):
        params = tuple(param for _, param in named_params)
        self.placement, self.sharded, self.source = placement, sharded, source
        self.trained = params[0].requires_grad  # as all others of the bucket
        self.shapes = [local(param).shape for param in params]
        # The dtype to compute in, and the dtype to reduce gradients in.
        self.param_dtype, self.reduce_dtype = precision.bucket_dtypes(params[0].dtype, *dtypes)
        self._alignment = precision.alignment(params[0], self.param_dtype)
        self.label = None  # what messages call it; None: by the names of its parameters
        self.used = set()  # numbers of the parameters that got a gradient since `zero_grad()`
        self.kept = {}  # {number: whole gradient} of earlier backwards, under `no_sync`
        super().__init__([(name, local(param)) for name, param in named_params], placement.group)
        self.params = params

    def alignment(self) -> int:
        return self._alignment

    def flatten(self) -> torch.Tensor:
        """As in the chapter, also for parameters on `meta`; replicas start from the same weights, too."""
        on_meta = self.source.begin(self.names, self.params) if self.source is not None else []
        flat = self.params[0].new_zeros(self.numel)
        for index, param in enumerate(self.params):
            place = self.place(flat, index)
            place.copy_(param.detach())
            param.data = place
        if on_meta:
            self.source.fill(on_meta)
        torch.distributed.broadcast(precision.sendable(flat), group_src=0, group=self.placement.everyone)
        return flat

    def make_pieces(self) -> list[torch.Tensor]:
        if self.sharded:
            self.shard = self.shard.clone()
            self.flat.untyped_storage().resize_(0)
        self.placement.adopt(self)  # in mixed precision or offload the shard gets its own memory
        return [part.detach().requires_grad_(self.trained) for part in self.cut(self.shard)]

    def place(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        begin, shape = self.offsets[index], self.shapes[index]
        return flat[begin : begin + shape.numel()].view(shape)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's place in a whole buffer."""
        return [self.place(flat, index) for index in range(len(self.params))]

    def numbered(self, parts) -> list[tuple[int, torch.Tensor]]:
        """(number of the parameter, part) of what `cut` returned, or of `pieces`."""
        return [(index, part) for (index, _, _), part in zip(self.cuts, parts)]

    def gather(self) -> NamedWork:
        """As in the chapter; the shard is rounded first, in mixed precision, and comes from the host, in offload."""
        shard = precision.rounded_shard(self)
        whole = precision.sendable(self.flat)
        work = zero1.all_gather(whole, shard, group=self.group, async_op=True)
        return NamedWork(work, "all-gather", self)

    def add_to_pieces(self, shard: torch.Tensor) -> None:
        """The end of step 3: each piece gets its part of the mean, in its own dtype. Backwards of one step add up."""
        for piece, part in zip(self.pieces, self.cut(shard)):
            part = part.to(piece.dtype)
            piece.grad = part if piece.grad is None else piece.grad.add_(part)

    def take_gradient(self, index: int) -> torch.Tensor | None:
        gradient = guard.take_gradient(self.params[index])
        if gradient is not None and gradient.layout is not torch.strided:
            gradients.refuse_sparse(self, index)
        return gradient


class EngineReduction(zero2.Reduction):
    """A reduction in the dtype that gradients are reduced in; its shard goes to replicas and to the host, if any."""

    def __init__(self, bucket):
        self.bucket = bucket
        self.flat = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        # In one call, which is quicker on a GPU. A parameter without a gradient sends zeros.
        torch._foreach_copy_(bucket.views(self.flat), gradients.take(bucket))
        self.shard = self.flat.new_empty(bucket.shard_numel)
        to_sum = precision.before_sum(self.flat, bucket.world_size)
        work = zero2.reduce_scatter(self.shard, to_sum, group=bucket.group, async_op=True)
        self.work = NamedWork(work, "reduce-scatter", bucket)

    def finish(self) -> None:
        self.work.wait()
        self.flat = None
        precision.mean_of_sum(self.shard, self.bucket.world_size)
        self.bucket.placement.deliver(self.bucket, self.shard)
