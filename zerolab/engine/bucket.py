"""What real training adds to a bucket, to its reduction, and to ZeRO-3's unit, which may have several buckets."""

import torch
from torch import nn
from torch.profiler import record_function

import zero1
import zero2
from zerolab.engine.hooks import GradientHook
from zerolab.engine.options import precision
from zerolab.engine.options.tensor_parallel import local
from zerolab.engine.safety import guard
from zerolab.engine.safety.waiting import NamedWork, name_some


class EngineBucket(zero1.Bucket):
    """A bucket of an engine: frozen or trained parameters, in mixed precision, on replicas, in the host's memory.

    `unit` is the name of ZeRO-3's unit, whose `flat` is freed as soon as this rank has its shard. `source`: see
    `options/meta.py`.
    """

    def __init__(self, named_params, placement, dtypes, unit: str | None = None, source=None):
        self.names, params = zip(*named_params)
        self.placement, self.unit, self.source = placement, unit, source
        self.trained = params[0].requires_grad  # as all others of the bucket
        self.shapes = [local(param).shape for param in params]
        # The dtype to compute in, and the dtype to reduce gradients in.
        self.param_dtype, self.reduce_dtype = precision.bucket_dtypes(params[0].dtype, *dtypes)
        self.label = f"the bucket of {name_some(self.names)}" if unit is None else f"unit {unit!r}"  # in messages
        self.used = set()  # numbers of the parameters that got a gradient since `zero_grad()`
        self.kept = {}  # {number: its whole gradient} of earlier backwards, under `no_sync`
        self.handles = []  # of the hooks on its parameters
        super().__init__([(name, local(param)) for name, param in named_params], placement.group)
        self.params = params  # under tensor parallelism `local` of each is what lies in `flat`
        # (shape, strides, beginning) of each parameter's place: a view of a whole buffer in one operation.
        strides = [torch.empty(shape, device="meta").stride() for shape in self.shapes]
        self.places = list(zip(self.shapes, strides, self.offsets))
        self.divisors = precision.divisors(self.reduce_dtype, self.world_size)
        self.rounded = precision.is_rounded(self)  # whether what is gathered is not the shard as it is

    def alignment(self) -> int:
        return precision.alignment(self.params[0], self.param_dtype)

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
        if self.unit is not None:
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
        whole, shard = precision.rounded(self) if self.rounded else (self.flat, self.shard)
        work = zero1.all_gather(whole, shard, group=self.group, async_op=True)
        return NamedWork(work, "all-gather", self)

    # Gradients, from autograd to the pieces.

    def watch(self, on_gradient) -> None:
        """As in the chapter, by hooks that hold nobody alive."""
        for index, param in enumerate(self.params):
            hook = GradientHook(on_gradient, self, index)
            self.handles.append(param.register_post_accumulate_grad_hook(hook))

    def came(self, index: int) -> None:
        """A gradient is finished. Raises RuntimeError for what would be reduced wrongly: a second, a sparse one, none.

        Nobody removes it from `missing` here: that is the stage's.
        """
        if index not in self.missing:
            raise RuntimeError(
                f"a second gradient of {self.names[index]!r} came before its bucket was reduced: the backward before "
                "this one was interrupted, or left a parameter without a gradient. Several losses of one forward: call "
                "backward on their sum, or all but the last under engine.no_sync(). A step that leaves parameters "
                "unused: build the engine with find_unused=True. After an error: call engine.zero_grad() before the "
                "next forward"
            )
        param = self.params[index]
        self.refuse_wrong(index, guard.gradient_of(param))
        self.used.add(index)
        param.zero_moved = True

    def refuse_wrong(self, index: int, gradient) -> None:
        if gradient is None:
            raise RuntimeError(
                f"the gradient of {self.names[index]!r} is gone: a hook has set param.grad = None, or requires_grad "
                "was switched off between forward and backward. Let hooks change gradients and leave them there, and "
                "switch requires_grad between two steps. Call engine.zero_grad() before the next forward"
            )
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {self.names[index]!r} is sparse; build its embedding with sparse=False"
            )

    def take_gradient(self, index: int) -> torch.Tensor:
        gradient = guard.take_gradient(self.params[index])
        self.refuse_wrong(index, gradient)
        return gradient

    def keep(self, index: int) -> None:
        """Under `no_sync`: move `param.grad` to `kept`, where several backwards add up in the reduce dtype."""
        gradient = guard.take_gradient(self.params[index]).to(self.reduce_dtype)
        if index in self.kept:
            self.kept[index].add_(gradient)
        else:
            self.kept[index] = gradient

    def take_gradients(self) -> list[torch.Tensor]:
        """The whole gradient of each parameter, with what `no_sync` has kept; `param.grad` is None from now on.

        A parameter without a gradient (`find_unused`) sends zeros.
        """
        with torch._C.DisableTorchFunctionSubclass():  # quick, also for freed parameters
            gradients = [guard.take_gradient(param) for param in self.params]
        for index, kept in self.kept.items():
            gradients[index] = kept if gradients[index] is None else kept.add_(gradients[index])
        self.kept = {}
        for index, gradient in enumerate(gradients):
            if gradient is None:
                gradients[index] = self.flat.new_zeros(()).expand(self.shapes[index])
        return gradients

    def add_to_pieces(self, shard: torch.Tensor) -> None:
        """The end of step 3: each piece gets its part of the mean, in its own dtype. Backwards of one step add up."""
        for piece, (_, begin, end) in zip(self.pieces, self.cuts):
            part = shard[begin:end].to(piece.dtype)
            gradient = guard.gradient_of(piece)
            piece.grad = part if gradient is None else gradient.add_(part)


class EngineReduction(zero2.Reduction):
    """A reduction in the dtype that gradients are reduced in; its shard goes to replicas and to the host, if any."""

    def __init__(self, bucket):
        self.bucket = bucket
        self.flat = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        places = [self.flat.as_strided(*place) for place in bucket.places]
        torch._foreach_copy_(places, bucket.take_gradients())  # in one call: quicker on a GPU
        self.shard = self.flat.new_empty(bucket.shard_numel)
        before, self.after = bucket.divisors
        if before > 1:
            self.flat.div_(before)
        work = zero2.reduce_scatter(self.shard, self.flat, group=bucket.group, async_op=True)
        self.work = NamedWork(work, "reduce-scatter", bucket)

    def finish(self) -> None:
        self.work.wait()
        self.flat = None
        self.shard.div_(self.after)
        placement = self.bucket.placement
        if placement.elsewhere:
            placement.deliver(self.bucket, self.shard)
        else:
            self.bucket.add_to_pieces(self.shard)


class EngineUnit:
    """A module whose parameters are gathered and freed together.

    It has one bucket as a rule, and one per kind where it mixes dtypes, or frozen and trained parameters.
    """

    def __init__(self, name: str, module: nn.Module, named_params, engine, source):
        self.name, self.module = name, module
        self.placement = engine.placement
        self.order = engine.order  # an error if another rank gathers another unit
        kinds = {}
        for param_name, param in named_params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((param_name, param))
        self.buckets = [EngineBucket(kind, engine.placement, engine.dtypes, name, source) for kind in kinds.values()]
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.trained]
        self.params, self.pieces = [], []
        for bucket in self.buckets:
            self.params += bucket.params
            self.pieces += bucket.pieces
        self.pending = 0  # how many gradients of its inputs this backward has still to finish
        self.told = False  # whether there are such gradients in this backward
        self.works = []  # its all-gathers in flight
        self.gathered = False  # whether its buffers have memory; what is in flight may still be missing

    @property
    def missing(self) -> bool:
        """Whether a gradient has still to come in this backward."""
        return any([bucket.missing for bucket in self.trained_buckets])

    def watch(self, on_gradient) -> None:
        for bucket in self.trained_buckets:
            bucket.watch(on_gradient)

    def start_gather(self) -> None:
        """Step 5, first half. Nobody may use the unit before `wait`."""
        if self.gathered:
            return
        self.order.next("all-gather", self)
        with record_function("step 5 gather parameters"):
            for bucket in self.buckets:
                # On a GPU work runs in queues, called streams, and collectives have their own. The stream that computes
                # frees this memory later, so it allocates it, too: the allocator can reuse it without a signal.
                bucket.flat.untyped_storage().resize_(bucket.numel * bucket.flat.element_size())
                if self.placement.elsewhere:
                    with self.placement.copies_beside():  # offload only: a stream of its own for copies from the host
                        self.works.append(bucket.gather())
                else:
                    self.works.append(bucket.gather())
        self.gathered = True

    def wait(self) -> None:
        """Step 5, second half: from here on the unit may compute."""
        if self.works:
            while self.works:
                self.works.pop(0).wait()
            guard.open(self.params)  # using them was an error up to here

    def free(self) -> None:
        """Give back the memory of the gathered parameters. This rank's shard stays."""
        if not self.gathered:
            return
        self.wait()  # never free a buffer that a collective still writes to
        for bucket in self.buckets:
            bucket.flat.untyped_storage().resize_(0)
        self.gathered = False
        guard.close(self.params)  # using them is an error from here on
