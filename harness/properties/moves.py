"""What each move of a stage must do, looked at alone: values against plain PyTorch, bytes, order of collectives.

A check is a function of a `Sheet`, run on every rank, and writes down what differs from what is expected. It looks at
a step alone, with the steps behind it replaced, as long as that is possible. So it can be asked of a class of which the
steps behind are not written yet: `./launch.sh check` does.
"""

import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.engine import guard
from harness.engine.units import default_units, parameters_by_unit
from harness.engine.waiting import label
from harness.measure.memory import held_bytes
from harness.properties import parts
from harness.properties.layout import padded
from harness.properties.sheet import ACTIVATIONS, EXACT, LAYER, LAYERS, MIXED, ROUNDED, Events, Sheet, Work, move

# Step 0, with no rank needed.

SHAPES = [[(6,)], [()], [(5,), (3,), (1,)], [(2, 2), (4,)], [(5, 7), (7,), (9, 5), (), (2,)], [(17,)], [(8, 8), (8,)]]
DTYPES = [(torch.float32, None), (torch.float64, None), (torch.float32, torch.bfloat16)]


def _buckets(sheet: Sheet, dtypes, world_sizes, shapes_of):
    """(what it is, its parameters, world size, rank, bucket) of many layouts."""
    for (dtype, param_dtype), world_size, shapes in itertools.product(dtypes, world_sizes, shapes_of):
        named = [(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for i, shape in enumerate(shapes)]
        said = ", ".join(" x ".join(map(str, shape)) or "()" for shape in shapes)
        at = f"N = {world_size}, parameters of {said} elements, {str(dtype)[6:]}"
        at += f" with param_dtype {str(param_dtype)[6:]}" * (param_dtype is not None)
        for rank in range(world_size):
            yield at, named, world_size, rank, sheet.chapter.Bucket(named, rank, world_size, (param_dtype, None))


@move("bytes", "zero1", step=0)
def zero1_layout(sheet: Sheet) -> None:
    """Parameters lie end to end on 16-byte boundaries, in N equal shards, with no more padding than needed."""
    shapes_of = [*SHAPES, [(0,)], [(3,), (0, 2), (2,)]]
    for at, named, world_size, rank, bucket in _buckets(sheet, DTYPES, (1, 2, 3, 4, 7), shapes_of):
        sizes = [param.numel() for _, param in named]
        align = 16 // min(bucket.param_dtype.itemsize, named[0][1].dtype.itemsize)
        most = max(padded(sizes, world_size, align)[0], align * world_size)
        offsets, whole = list(bucket.offsets), bucket.shard_numel * world_size
        if len(offsets) != len(sizes):
            return sheet.expect(False, f"offsets at {at}", f"{len(sizes)} of them", offsets)
        unaligned = [offset for offset in (*offsets, bucket.shard_numel) if offset % align]
        sheet.equal(f"offsets and shard_numel at {at}", unaligned, [], f"multiples of {align} (16 bytes)")
        ends = [offset + size for offset, size in zip(offsets, sizes)]
        apart = offsets[0] >= 0 and all(a <= b for a, b in zip(ends, offsets[1:]))
        sheet.expect(apart, f"offsets at {at}", "one parameter behind the other, none over another", offsets)
        sheet.equal(f"numel at {at}", bucket.numel, whole, f"N x shard_numel = {whole}")
        least = max(1, *ends)
        room = f"room for all, so {least} or more, and no more padding than needed, so {most} at most"
        sheet.expect(least <= bucket.numel <= most, f"numel at {at}", room, bucket.numel)
        sheet.equal(f"start of rank {rank} at {at}", bucket.start, rank * bucket.shard_numel)
        if sheet.findings:
            return


@move("values", "zero1", step=0)
def zero1_cut(sheet: Sheet) -> None:
    """The parts of all ranks' shards are views, and hold every element of every parameter exactly once."""
    found = {}
    for at, named, world_size, rank, bucket in _buckets(sheet, DTYPES[:1], (1, 2, 3, 5), SHAPES):
        found = [[] for _ in named] if rank == 0 else found
        flat = torch.arange(bucket.numel)
        cuts = bucket.cut(flat[bucket.start : bucket.start + bucket.shard_numel])
        if cuts is None:
            return sheet.expect(False, "what Bucket.cut returns", "pairs (index, part)", "None: is a return missing?")
        for index, part in cuts:
            what = f"the part of p{index} on rank {rank} at {at}"
            view = part.untyped_storage()._cdata == flat.untyped_storage()._cdata
            sheet.expect(view, what, "a view of the shard", "a copy")
            shape = f"a tensor of shape {tuple(part.shape)}"
            sheet.expect(part.numel() > 0 and part.dim() == 1, what, "one dimension, and no empty parts", shape)
            found[index] += part.flatten().tolist()
        for index, expected in enumerate(bucket.views(flat) if rank == world_size - 1 else ()):
            what = f"places in the buffer of all ranks' parts of p{index} at {at}"
            sheet.equal(what, found[index], expected.flatten().tolist())
        if sheet.findings:
            return


# Gradients, of all stages.


def _keeping_in_flight(sheet: Sheet):
    """The class under test, whose `gradients_final` must return before what it has sent is received."""

    def gradients_final(self, part) -> None:
        first = len(Work.issued)
        sheet.engine_cls.gradients_final(self, part)
        sent = [work for work in Work.issued[first:] if work.what.startswith("reduce_scatter")]
        late = not sent or not sent[-1].waited
        whose = f"unit {part.name!r}" if hasattr(part, "name") else label(part)
        sheet.expect(late, f"the last reduce-scatter when gradients_final of {whose} returns",
                     "in flight: the next _send receives it, and backward goes on", "received already")  # fmt: skip

    return sheet.probe(gradients_final=gradients_final)


def gradients(sheet: Sheet) -> None:
    """Backward and step 3 leave the right gradients on the pieces, however many backwards there were."""
    kind, times = sheet.promise.reduce
    in_backward = sheet.name in ("zero2", "zero3")  # is where step 3 is
    twice, unsent = ", after two backwards", ", after a backward under no_sync() and another"
    for options in sheet.setups((twice, {}), (unsent, {}), (", with find_unused=True", {"find_unused": True})):
        engine = sheet.build_odd(_keeping_in_flight(sheet) if in_backward else None, **options)
        passes = 2 if sheet.at in (twice, unsent) else 1
        sending = 2 if sheet.at == twice and in_backward else 1  # backwards that send
        with sheet.listen() as traffic, sheet.received("backward and step 3"):
            if sheet.at == unsent:
                with engine.no_sync():
                    sheet.backward(engine)
            for _ in range(2 if sheet.at == twice else 1):
                sheet.backward(engine)
            if in_backward:
                inside = sum(c.kind.startswith(kind) for c in traffic.collectives)
                once = len(engine.trained_buckets) * sending
                said = f"{once}: one per bucket and backward"
                sheet.equal("reduce-scatters inside backward", inside, once, said)
            engine._reduce_gradients()
        sheet.right_gradients(engine, times=passes)
        if options.get("find_unused"):
            traffic.collectives.pop()  # which parameters were used
        if sheet.name == "zero3":  # in forward and in backward; the root for both together
            gathers = [c for c in traffic.collectives if c.kind == "all-gather"]
            once = (2 * len(engine.buckets) - len(engine.root.buckets)) * passes
            sheet.equal("all-gathers of forward and backward", len(gathers), once,
                        f"{once}: one per bucket in forward and one in backward, but for the root; none for what was "
                        "freed too early")  # fmt: skip
            traffic.collectives = [c for c in traffic.collectives if c not in gathers]
        nbytes = sum(bucket.numel * bucket.reduce_dtype.itemsize for bucket in engine.trained_buckets)
        sheet.traffic(traffic, [kind], times * sending, nbytes, "for the gradients")


# ZeRO-1.


@move("values", "zero1", step=3)
def zero1_gradients(sheet: Sheet) -> None:
    """Step 3 puts the mean of all ranks' gradients on the pieces, sends it once, and makes no second copy."""
    gradients(sheet)
    with sheet.ledger() as (memory, engine):
        inputs, targets = sheet.vectors(0)
        F.mse_loss(engine(inputs), targets).backward()
        memory.mark()
        engine._reduce_gradients()
    scattered = sheet.promise.reduce[0] == "reduce-scatter"
    shard = LAYERS * LAYER / sheet.world_size
    allowed = shard * scattered + sheet.padding(engine.buckets)
    means = "4Ψ/N: a shard" if scattered else "none: sum and mean in place, and pieces take views"
    sheet.at_most("bytes alive after step 3, more than before", memory.more, allowed, means)
    # In place or not, a shard more may exist for a moment.
    means = "no second copy of the gradients"
    sheet.at_most("bytes alive in step 3, more than before", memory.most, allowed + shard, means)


@move("order", "zero1", step=4)
def zero1_update(sheet: Sheet) -> None:
    """A step reduces, then updates this rank's pieces alone, then gathers what was trained, in the engine's group."""
    gathered, order = [], []

    def gather(buckets, group):
        gathered.append((list(buckets), group))
        order.append("gather")

    def reduce(self) -> None:
        order.append("reduce")
        sheet.engine_cls._reduce_gradients(self)

    engine = sheet.build_odd(sheet.probe(_reduce_gradients=reduce))
    engine.optimizer.register_step_post_hook(lambda *_: order.append("update"))
    sheet.backward(engine)
    with mock.patch.object(sheet.chapter, "gather_parameters", gather):
        engine.step()
    early = {"update", "reduce"} <= {*order} and order.index("update") < order.index("reduce")
    found = (", then ".join(order) or "none of them") + ": updated before reduced" * early
    right = order == ["reduce", "update", "gather"]
    sheet.expect(right, "the order of steps 3, 4 and 5", "reduce, then update, then gather", found)
    plain, _ = sheet.oracle(1)
    values = dict(plain.named_parameters())
    for name, piece, part in sheet.pieces(engine):
        sheet.same(f"this rank's piece of {name} after the update", piece, values[name].detach().flatten()[part])
    sheet.expect([buckets for buckets, _ in gathered] == [engine.trained_buckets], "calls of gather_parameters",
                 f"one, of the {len(engine.trained_buckets)} trained buckets: what is frozen has not changed",
                 " and ".join(f"one of {len(buckets)} buckets" for buckets, _ in gathered) or "none")  # fmt: skip
    elsewhere = [group for _, group in gathered if group is not engine.group]
    sheet.expect(not elsewhere, "the group that gather_parameters is given", "self.group", "another one")
    owned = sum(param.numel() for group in engine.optimizer.param_groups for param in group["params"])
    owned = int(sum(_of_all_ranks(sheet, torch.tensor(owned))))
    every = sum(param.numel() for param in plain.parameters() if param.requires_grad)
    sheet.equal("elements that the ranks' optimizers update, all ranks together", owned, every, f"{every}, each once")


@move("values", "zero1", step=5)
def zero1_gather(sheet: Sheet) -> None:
    """Step 5 brings every shard into all ranks' weights, which stay views, with one all-gather and no copy."""
    for options in sheet.setups():
        engine = sheet.build_odd(**options)
        right = [torch.arange(bucket.numel, device=sheet.device) / 16 for bucket in engine.buckets]
        for bucket, values in zip(engine.buckets, right):
            bucket.flat.zero_()
            bucket.shard.copy_(values[bucket.start : bucket.start + bucket.shard_numel])
        with sheet.listen() as traffic, sheet.received("step 5"):
            sheet.chapter.gather_parameters(engine.buckets, engine.group)
        for bucket, values in zip(engine.buckets, right):
            views = zip(bucket.names, bucket.params, bucket.views(bucket.flat), bucket.views(values))
            for name, param, view, expected in views:
                sheet.same(f"the weight {name} on this rank", param, expected)
                still = param.data_ptr() == view.data_ptr()
                sheet.expect(still, f"the weight {name}", "still a view of bucket.flat", "a tensor of its own")
        sent = sum(bucket.flat.nbytes for bucket in engine.buckets)
        sheet.traffic(traffic, ["all-gather"], 1, sent, "in step 5")
    with sheet.ledger() as (memory, engine):
        sheet.chapter.gather_parameters(engine.buckets, engine.group)
    means = "at most a shard, 4Ψ/N: gather into bucket.flat itself"
    sheet.at_most("bytes alive in step 5, more than before", memory.most, sheet.share(engine.buckets), means)
    sheet.at_most("bytes alive after step 5, more than before", memory.more, 0, "none")


# ZeRO-2.


def _keep(self, part) -> None:
    """`gradients_final`, but every gradient stays where backward has left it, in `param.grad`."""


def _own_gradients(sheet: Sheet, options):
    """(engine, {parameter: this rank's own gradient}) after a backward that reduced nothing."""
    engine = sheet.build_odd(sheet.probe(gradients_final=_keep), **options)
    sheet.backward(engine)
    return engine, {param: param.grad.clone() for bucket in engine.trained_buckets for param in bucket.params}


def _still_in_flight(sheet: Sheet, what: str, collectives: int, first: int = 0, read: str = "") -> None:
    """Of the works issued since number `first`, one per collective, the last was not waited for yet."""
    works = Work.issued[first:]
    found = "waited for already" if works and works[-1].waited else "over already: is it started with async_op=True?"
    late = collectives == 0 or (len(works) >= collectives and not works[-1].waited)
    sheet.expect(late, what, "in flight: it travels while the rank computes, and is waited for later", found, read=read)


@move("values", "zero2", step=3)
def zero2_send(sheet: Sheet) -> None:
    """A reduction starts one reduce-scatter of all that a bucket has, zeros for what is missing, and takes it away."""
    for options in sheet.setups():
        engine, own = _own_gradients(sheet, options)
        for bucket in engine.trained_buckets:
            right = torch.zeros(bucket.numel, dtype=bucket.reduce_dtype, device=sheet.device)
            for number, (param, view) in enumerate(zip(bucket.params, bucket.views(right))):
                if number % 3 != 2:
                    view.copy_(own[param])
                else:  # as find_unused may leave it
                    param.grad = None
                if number % 2:  # as no_sync leaves it
                    bucket.kept[number] = own[param].to(bucket.reduce_dtype)
                    view.add_(bucket.kept[number])
            Work.issued.clear()
            with sheet.listen() as traffic:
                reduction = sheet.chapter.Reduction(bucket, sheet.group)
            _still_in_flight(sheet, "the reduce-scatter when Reduction() returns", len(traffic.collectives))
            sheet.traffic(traffic, ["reduce-scatter"], 1, right.nbytes, f"for a bucket of {right.nbytes} bytes")
            sent = torch.cat(traffic.reduced) if traffic.reduced else right[:0]
            sheet.equal("the dtype of what is sent", sent.dtype, right.dtype)
            sheet.equal("elements that are sent", len(sent), len(right))
            if not sheet.findings:
                for name, a, b in zip(bucket.names, bucket.views(sent), bucket.views(right)):
                    what = f"what is sent of {name} (gradients.take: param.grad, zeros for None, and bucket.kept)"
                    sheet.same(what, a, b, ROUNDED if sent.dtype == torch.bfloat16 else EXACT)
                sheet.same("the buffer that is sent, with its padding", sent, right, ROUNDED)
            left = [name for name, param in zip(bucket.names, bucket.params) if param.grad is not None]
            sheet.expect(not left, "parameters with a .grad after sending", "none", ", ".join(left))
            sheet.equal("gradients left in bucket.kept", len(bucket.kept), 0, "none")
            dist.barrier(sheet.group)  # before its buffers go
            del reduction


@move("values", "zero2", step=3)
def zero2_receive(sheet: Sheet) -> None:
    """A reduction that has finished has added the mean to the pieces, and holds nothing of the whole buffer."""
    for options in sheet.setups():
        engine, own = _own_gradients(sheet, options)
        for times in (1, 2):  # a second backward before the step adds up
            with sheet.received("Reduction"):
                for bucket in engine.trained_buckets:
                    for param in bucket.params:
                        param.grad = own[param].clone()
                    sheet.chapter.Reduction(bucket, sheet.group).finish(len(sheet.ranks))
            sheet.right_gradients(engine, times=times)
    with sheet.ledger(sheet.probe(gradients_final=_keep)) as (memory, engine):
        (bucket,) = engine.trained_buckets
        for param in bucket.params:
            param.grad = torch.zeros_like(param)
        reduction = sheet.chapter.Reduction(bucket, sheet.groups.silent)
        reduction.finish(sheet.world_size)
        held = memory.more
        del reduction
        left = memory.more
    share = sheet.share([bucket])
    means = "4Ψ/N on the pieces, 4Ψ/N that came, and nothing of the whole buffer"
    sheet.at_most("bytes of gradients alive after finish", held, 2 * share, means)
    sheet.at_most("bytes of gradients alive after finish, when the Reduction is gone", left, share, "4Ψ/N")


@move("order", "zero2", step=3)
def zero2_in_flight(sheet: Sheet) -> None:
    """One bucket travels at a time: sending one receives the one before, first."""
    for options in sheet.setups():
        engine, _ = _own_gradients(sheet, options)
        with sheet.listen() as traffic, sheet.received("self._send and self._receive"):
            for bucket in engine.trained_buckets:
                sent = len(Work.issued), len(traffic.collectives)
                engine._send(bucket)
                new = len(traffic.collectives) - sent[1]
                _still_in_flight(sheet, "the reduce-scatter of a bucket when _send returns", new, sent[0])
            engine._receive()
        sheet.right_gradients(engine)
        sizes = [bucket.numel * bucket.reduce_dtype.itemsize for bucket in engine.trained_buckets]
        sheet.equal("bytes of the collectives", traffic.sizes, sizes)
        sheet.traffic(traffic, ["reduce-scatter"], 1, sum(sizes), "for all buckets")
    with sheet.ledger(sheet.probe(gradients_final=_keep), bucket_mb=LAYER / 2**20) as (memory, engine):
        for bucket in engine.trained_buckets:
            for param in bucket.params:  # as backward fills it
                param.grad = torch.zeros_like(param)
            engine._send(bucket)
        engine._receive()
    allowed = 2 * LAYER + sheet.share(engine.buckets)
    means = f"4Ψ/N + 2 buckets of {LAYER:,}: receive the one before first"
    sheet.at_most("bytes of gradients alive, bucket after bucket", memory.most, allowed, means)


@move("order", "zero2", step=3)
def zero2_turns(sheet: Sheet) -> None:
    """Backward sends every bucket once, in one order, and two are whole at most."""
    gradients(sheet)
    # Gradients that finish in the opposite order must not change the order of the buckets.
    reverse = "backward, when the first layer's gradients come first"
    for what, way in {"backward": [0, 1, 2, 3], reverse: [3, 2, 1, 0]}.items():
        model = sheet.lanes()
        model.way = way
        engine = sheet.build(model, bucket_mb=0)
        inputs, _ = sheet.vectors(0, width=8)
        with sheet.listen() as traffic:
            engine(inputs).square().mean().backward()
        sizes = [4 * bucket.numel for bucket in engine.trained_buckets]
        said = f"{sizes}: every bucket once, in the order of self.trained_buckets"
        sheet.equal(f"bytes of the collectives inside {what}", traffic.sizes, sizes, said)
    if not sheet.findings:
        _worst_moment(sheet, 2 * LAYER, f"2 buckets of {LAYER:,}", bucket_mb=LAYER / 2**20)


def _worst_moment(sheet: Sheet, allowed: int, means: str, cls=None, **options) -> None:
    """In the second backward: at its worst moment 4Ψ/N bytes of gradients and `allowed`, after step 3 only 4Ψ/N."""
    batches = [sheet.vectors(step) for step in range(2)]
    with sheet.ledger(cls, **options) as (memory, engine):
        F.mse_loss(engine(batches[0][0]), batches[0][1]).backward()
        engine._reduce_gradients()
        engine.zero_grad()
        memory.mark()
        loss = F.mse_loss(engine(batches[1][0]), batches[1][1])
        memory.reset_peak()
        loss.backward()
        most = memory.most
        engine._reduce_gradients()
        after = memory.more
    share, means = sheet.share(engine.buckets), f"4Ψ/N of gradients, {means}, and activations"
    at = f", with prefetch {options['prefetch']}" if "prefetch" in options else ""
    sheet.at_most(f"bytes alive at backward's worst moment{at}", most, share + allowed + ACTIVATIONS, means)
    sheet.at_most("bytes of gradients alive after step 3", after, share + 64, "4Ψ/N")


def _of_all_ranks(sheet: Sheet, number) -> list[float]:
    """Every rank's `number`, a tensor of one element; NaN for what is none. A collective of all ranks."""
    own = number.item() if isinstance(number, torch.Tensor) and number.numel() == 1 else float("nan")
    everyone = torch.empty(sheet.world_size, dtype=torch.float64, device=sheet.device)
    dist.all_gather_single(everyone, torch.tensor([own], dtype=torch.float64, device=sheet.device))
    return everyone.tolist()


@move("values", "zero2", step=3)
def zero2_clip(sheet: Sheet) -> None:
    """Clipping scales all pieces by the norm of the whole gradient, which is the same on every rank, as is its NaN."""
    for options in sheet.setups():
        for max_norm, norm_type in ((0.05, 2.0), (1e3, 2.0), (0.05, float("inf")), (0.05, 1.0)):
            _clip_once(sheet, options, max_norm, norm_type)
    # Three elements: from three ranks on, the last own nothing but padding. And one rank's NaN is everybody's.
    engine = sheet.build(nn.Linear(3, 1, bias=False).to(sheet.device))
    engine(torch.ones((1, 3), device=sheet.device)).sum().backward()
    norm = engine.clip_grad_norm_(1.0)
    sheet.expect(abs(norm.item() - 3**0.5) < 1e-5, "the norm of three gradients of 1", 1.732, norm.item())
    for source, norm_type in itertools.product((0, sheet.world_size - 1), (2.0, float("inf"))):
        engine = sheet.build_odd()
        sheet.backward(engine)
        engine._reduce_gradients()
        for _, piece, _ in list(sheet.pieces(engine))[:1] if sheet.rank == source else ():
            piece.grad.fill_(float("nan"))
        norm = engine.clip_grad_norm_(1.0, norm_type)
        what = f"the norm with norm_type {norm_type:g} when rank {source} has a NaN"
        sheet.expect(norm.isnan().item(), what, "NaN on every rank", norm.item())


def _clip_once(sheet: Sheet, options, max_norm: float, norm_type: float) -> None:
    engine = sheet.build_odd(**options)
    sheet.backward(engine)
    right = {name: gradient.clone() for name, gradient in sheet.gradients().items() if gradient is not None}
    if norm_type == 1:  # a parameter that no rank has used, as find_unused leaves it
        engine._reduce_gradients()
        right.pop("head.bias")
        for name, piece, _ in sheet.pieces(engine):
            piece.grad = None if name == "head.bias" else piece.grad
    with sheet.listen() as traffic:
        norm = engine.clip_grad_norm_(max_norm, norm_type)
    whole = [torch.zeros_like(gradient) for gradient in right.values()]
    for tensor, gradient in zip(whole, right.values()):
        tensor.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(whole, max_norm, norm_type)
    at = f"with max_norm {max_norm:g}, norm_type {norm_type:g}"
    norm = torch.tensor(norm) if isinstance(norm, float) else norm
    norms = _of_all_ranks(sheet, norm)
    if len(sheet.ranks) > 1 and len({f"{each:.9g}" for each in norms}) > 1:
        said = ", ".join(f"{each:.6g} on rank {rank}" for rank, each in enumerate(norms))
        said = f"the ranks' norms differ: {said}. Is it the norm of each rank's own shards?"
        sheet.expect(False, f"the norm that is returned {at}", f"{expected.item():.6g} on every rank", said)
    sheet.same(f"the norm that is returned {at}", norm, expected, ROUNDED if options is MIXED else EXACT)
    sheet.right_gradients(engine, right)
    means = "some numbers per rank, and no gradients"
    sheet.at_most(f"bytes sent {at}", traffic.sent_bytes, 64 * sheet.world_size, means)
    kinds = [c.kind for c in traffic.collectives if "outside" in c.kind]
    sheet.expect(not kinds, f"collectives {at}", "in group=self.group", ", ".join(kinds))


# ZeRO-3.


@move("values", "zero3", step=0)
def zero3_units(sheet: Sheet) -> None:
    """Every parameter is in exactly one unit, in the order of the modules, or in the root."""
    shared = nn.Linear(4, 4)
    models = {
        "a model with blocks, and weights outside of them": sheet.start(),
        "a model whose blocks share a weight": nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.Linear(4, 2))),
    }

    def names_in(unit) -> list[str]:
        return [name for bucket in unit.buckets for name in bucket.names]

    def in_any_order(units: dict[str, list[str]]) -> dict[str, list[str]]:
        return {unit: sorted(names) for unit, names in units.items()}

    for (said, model), given in itertools.product(models.items(), (False, True)):
        modules = [*reversed([module for module in model.modules() if not list(module.children())])] if given else None
        held, rest = parameters_by_unit(model, default_units(model) if modules is None else modules)
        names = {module: name for name, module in model.named_modules()}
        expected = {names[module]: [name for name, _ in params] for module, params in held.items() if params}
        at = f"of {said}{', with the modules given' * given}"
        found = sheet.chapter.make_units(model, modules, 0, 2, (None, None))
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list)):
            said = "None: is a return missing?" if found is None else type(found).__name__
            return sheet.expect(False, f"what make_units returns {at}", "(list of units, root)", said)
        units, root = found
        inside = {unit.name: names_in(unit) for unit in units}
        sheet.equal(f"names of the units {at}", list(inside), list(expected))
        right = in_any_order(inside) == in_any_order(expected)
        sheet.expect(right, f"parameters by unit {at}", expected, inside)
        rest, others = [name for name, _ in rest], names_in(root)
        sheet.expect(sorted(others) == sorted(rest), f"parameters of the root {at}", rest, others)
        sheet.expect(root.module is model, f"the root's module {at}", "the model itself", type(root.module).__name__)


class _Pending:
    """A gather in flight: notes how large the buffer was when somebody waited for it."""

    def __init__(self, buffer: torch.Tensor):
        self.buffer, self.nbytes = buffer, None

    def wait(self):
        self.nbytes = self.buffer.untyped_storage().nbytes()


@move("life", "zero3", step=5)
def zero3_free(sheet: Sheet) -> None:
    """A unit that is freed holds no byte, whoever keeps views of it; it is guarded, and its shard stays."""
    inputs, _ = sheet.vectors(0)
    cls = sheet.probe(_free=parts.STAGES["zero3"]._free)  # one that is right, for the construction
    with sheet.ledger(cls, frozen="layers.0.bias") as (memory, engine):  # so that the unit has two buckets
        unit = engine.units[0]
        for bucket in unit.buckets:
            bucket.flat.untyped_storage().resize_(bucket.numel * 4)
            bucket.flat.zero_()
        unit.gathered = True
        guard.open(unit.params)
        flats = [bucket.flat for bucket in unit.buckets]
        saved = F.linear(inputs, unit.module.weight, unit.module.bias)  # autograd keeps a view of the weight
        pending = [_Pending(bucket.flat) for bucket in unit.buckets]
        unit.works = [*pending]
        sheet.engine_cls._free(engine, unit)
        left = sum(flat.untyped_storage().nbytes() for flat in flats)
        left = max(left, memory.more - saved.untyped_storage().nbytes())
        kept = [bucket.flat is flat for bucket, flat in zip(unit.buckets, flats)]
        sheet.engine_cls._free(engine, unit)  # already freed: nothing to do
    places = {flat.untyped_storage()._cdata for flat in flats}
    shapes = [tuple(shape) for bucket in unit.buckets for shape in bucket.shapes]
    with torch._C.DisableTorchFunctionSubclass():  # they may be guarded
        here = [(param.untyped_storage()._cdata in places, tuple(param.shape)) for param in unit.params]
    none = "None" if None in [bucket.flat for bucket in unit.buckets] else "another tensor"
    waited = [work.nbytes == 4 * bucket.numel for work, bucket in zip(pending, unit.buckets)]
    guarded = all(isinstance(param, guard.Freed) for param in unit.params)
    there = all(bucket.shard.untyped_storage().nbytes() for bucket in unit.buckets)
    sheet.expect(all(kept), "bucket.flat after freeing a unit", "the tensor that it was, on a storage of 0 bytes: the "
                 "weights and what autograd has saved are views of it", none)  # fmt: skip
    sheet.expect(here == [(True, shape) for shape in shapes], "the weights of a unit that was freed",
                 "still views of bucket.flat", "tensors of their own: was param.data set?")  # fmt: skip
    sheet.at_most("bytes of gathered parameters alive after freeing a unit of a trained and a frozen bucket", left, 0,
                  "autograd holds a view of the weight, and must hold no memory with it")  # fmt: skip
    sheet.expect(unit.gathered is False, "unit.gathered after freeing", False, unit.gathered)
    sheet.expect(all(waited), "an all-gather in flight", "waited for, before the memory goes",
                 "not waited for, or too late")  # fmt: skip
    sheet.expect(guarded, "freed parameters", "guarded: guard.close(unit.params)", "a use of them would crash")
    sheet.expect(there, "this rank's shard", "still there", "freed as well")


@move("order", "zero3", step=5)
def zero3_gather(sheet: Sheet) -> None:
    """Gathering a unit starts one all-gather per bucket, straight into the weights, and waits for none."""
    read = f"the sentence on **Prefetch** at the top of {sheet.file}"  # where somebody waits too early
    for options in sheet.setups():
        engine = sheet.build_odd(**options)
        right = dict(sheet.start().named_parameters())
        for unit in engine.units:
            Work.issued.clear()
            name, works = f"unit {unit.name!r}", len(unit.buckets)
            with sheet.listen() as traffic, sheet.received("gathering a unit"):
                engine._gather(unit)
                sheet.expect(unit.gathered is True, f"unit.gathered after _gather of {name}", True, unit.gathered)
                sheet.equal(f"works in unit.works after _gather of {name}", len(unit.works), works,
                            f"{works}: one per bucket, not waited for yet", read)  # fmt: skip
                if unit.buckets and not sheet.findings:
                    _still_in_flight(sheet, f"the all-gather of {name} when _gather returns", works, read=read)
                engine._gather(unit)  # gathered already: nothing to do
                engine._wait(unit)
            found = [(c.kind, c.whole_bytes) for c in traffic.collectives]
            expected = [("all-gather", bucket.flat.nbytes) for bucket in unit.buckets]
            said = f"{expected}: one per bucket, in bytes"
            sheet.equal(f"collectives of gathering {name}, and of _gather once more", found, expected, said)
            for bucket in unit.buckets:
                nbytes = bucket.flat.untyped_storage().nbytes()
                sheet.equal(f"bytes of the buffer of {', '.join(bucket.names)}", nbytes, bucket.flat.nbytes)
                there = nbytes >= bucket.flat.nbytes  # or reading it would be the end
                views = bucket.views(bucket.flat) if there else ()
                for name, param, view in zip(bucket.names, bucket.params, views):
                    sheet.same(f"the gathered weight {name}", view, right[name].detach().to(view))
                    same = param.data_ptr() == view.data_ptr() if type(param) is nn.Parameter else True
                    sheet.expect(same, f"the weight {name}", "still a view of bucket.flat", "a tensor of its own")
            dist.barrier(sheet.group)  # nothing is on its way any more, whoever has waited
            engine._free(unit)
    with sheet.ledger() as (memory, engine):
        engine._gather(engine.units[0])
    means = "the unit: gather into bucket.flat itself"
    sheet.at_most("bytes alive while a unit is gathered", memory.most, LAYER + sheet.padding(engine.buckets), means)


def _expected_events(way, known, prefetch: int, backward: bool, free: bool, reduce: bool) -> list[str]:
    """Of a forward that runs the units `way`, when the one before ran them as `known`.

    Without `free` no unit is freed in backward: the engine does that at its end.
    """
    gathered, events = {}, []

    def gather(indices):
        for index in indices:
            if index not in gathered:
                gathered[index] = "on its way"
                events.append(f"gather {index}")

    def use(index, verb):
        if gathered[index] == "on its way":
            events.append(f"wait {index}")
        events.append(f"{verb} {index}")
        if free or verb == "forward":
            events.append(f"free {index}")
            del gathered[index]

    gather(known[:prefetch])
    for position, index in enumerate(way):
        gather([index])
        if known[position : position + 1] == [index]:
            gather(known[position + 1 : position + 1 + prefetch])
        use(index, "forward")
    back = list(reversed(way)) if backward else []
    for position, index in enumerate(back):
        gather(back[position : position + prefetch + 1])
        use(index, "backward")
        events += [f"reduce {index}"] * reduce
    return events + [f"free {index}" for index in sorted(gathered)]


def _why(found: list[str], expected: list[str]) -> str:
    """What a wrong order of events may come from, if that can be told."""

    def passes(events) -> dict[str, list[str]]:
        computed = [number for number, event in enumerate(events) if event.startswith("forward")]
        end = computed[-1] + 1 if computed else len(events)
        return {"forward": events[:end], "backward": events[end:]}

    for name, events in passes(found).items():
        for event in dict.fromkeys(events):
            times = events.count(event), passes(expected)[name].count(event)
            if event.startswith("gather") and times[0] > max(times[1], 1):
                return f"; unit {event.split()[1]} is gathered twice: was it freed before its {name}?"
    if any(event.startswith("reduce") for event in found) and not any(e.startswith("reduce") for e in expected):
        return "; to reduce a unit is for `gradients_final` to do"
    return ""


def _order_of_events(sheet: Sheet, cls=None, backward: bool = False, free: bool = True, reduce: bool = False) -> None:
    # As declared, again, another way, that again, and a longer way.
    ways = [[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 1, 3], [2, 0, 1, 3]] + [[2, 0, 1, 3, 0]] * (not backward)
    for prefetch in (1, 0, 2):
        model = sheet.lanes()
        engine = sheet.build(model, cls, prefetch=prefetch)
        for step, (known, way) in enumerate(zip([ways[0], *ways], ways), 1):
            model.way = way
            inputs, _ = sheet.vectors(step, width=8)
            with Events(engine) as mode, torch.set_grad_enabled(backward):
                loss = engine(inputs).square().mean()
                if backward:
                    loss.backward()
            ahead = prefetch if sheet.world_size > 1 else 0  # a rank that is alone waits for nothing
            expected = _expected_events(way, known, ahead, backward, free, reduce)
            if mode.events != expected and not sheet.findings:
                pairs = itertools.zip_longest(mode.events, expected)
                at = max(0, next(i for i, (found, right) in enumerate(pairs) if found != right) - 2)
                before = "..., " * bool(at)
                show = [before + (", ".join(events[at : at + 8]) or "nothing") for events in (expected, mode.events)]
                as_what = "as in the step before" if known == way else f"and in the step before ran {known}"
                what = f"order of events with prefetch {prefetch}, in step {step}: forward runs the units {way}, "
                what += "as the model declares them" if step == 1 else as_what
                sheet.expect(False, what, show[0], show[1] + _why(mode.events, expected))
            engine.zero_grad()


@move("order", "zero3")
def zero3_order(sheet: Sheet) -> None:
    """Units are gathered `prefetch` ahead, waited for, used, freed and reduced in one order, also where it changes."""
    _order_of_events(sheet, backward=True, reduce=True)


@move("order", "zero3", step=1)
def zero3_before_forward(sheet: Sheet) -> None:
    """Forward gathers each unit once, `prefetch` ahead, waits for the one at work alone, and keeps none."""
    engine, plain = sheet.build_odd(), sheet.start()
    inputs, _ = sheet.batch(0)
    sizes = [bucket.flat.nbytes for unit in (engine.root, *engine.units) for bucket in unit.buckets]
    with torch.no_grad():
        for _ in range(2):
            with sheet.listen() as traffic:
                output = engine(inputs)
            sheet.same("the model's output", output, plain(inputs))
    _order_of_events(sheet)  # of a model whose root is empty
    sheet.expect(sheet.findings or traffic.sizes == sizes, "bytes of the collectives in forward",
                 f"{sizes}: the root first, then the units in their order", traffic.sizes)  # fmt: skip
    inputs, _ = sheet.vectors(0)
    for prefetch, training in ((0, True), (1, True), (3, True), (1, False)) if not sheet.findings else ():
        with sheet.ledger(prefetch=prefetch) as (memory, engine), torch.set_grad_enabled(training):
            engine(inputs)
            most, after = memory.most, memory.more
        units, noise = 1 + prefetch, ACTIVATIONS + sheet.padding(engine.buckets)
        what, means = "bytes of gathered parameters alive in forward", f"{units} unit(s) of {LAYER:,}, and activations"
        sheet.at_most(f"{what}, with prefetch {prefetch}", most, units * LAYER + noise, means)
        sheet.at_most("bytes alive after forward, more than before", after, noise, "activations")


@move("order", "zero3", step=2)
def zero3_before_backward(sheet: Sheet) -> None:
    """Backward gathers each unit once more, `prefetch` ahead, and leaves this rank its own gradients."""
    cls = sheet.probe(after_backward=lambda self, unit: None, gradients_final=_keep)
    engine, plain = sheet.build_odd(cls), sheet.start()
    inputs, targets = sheet.batch(0)
    F.cross_entropy(plain(inputs), targets).backward()
    with sheet.listen() as traffic:
        sheet.backward(engine)
    sent = any("reduce" in collective.kind for collective in traffic.collectives)
    none = "None" + ": it was sent away already. Was a unit reduced before backward had finished its gradients?" * sent
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for bucket in engine.trained_buckets:
        for name, param in zip(bucket.names, bucket.params):
            sheet.same(f"this rank's own gradient of {name} after backward", param.grad, expected[name], none=none)
    _order_of_events(sheet, cls, backward=True, free=False)


@move("order", "zero3", step=2)
def zero3_after_backward(sheet: Sheet) -> None:
    """Backward frees each unit right after its use, also what `reshard_after_forward=False` has kept."""
    left = []

    def drop(self, unit) -> None:
        """In the place of step 3. What of the unit is frozen may still be needed."""
        if unit.gathered and len(unit.trained_buckets) == len(unit.buckets):
            left.append(unit.name)
        for bucket in unit.trained_buckets:
            for param in bucket.params:
                param.grad = None

    cls = sheet.probe(gradients_final=drop)
    for reshard in (True, False):
        engine = sheet.build_odd(cls, reshard_after_forward=reshard)
        sheet.backward(engine)
        frozen = ", ".join(unit.name for unit in engine.units if len(unit.trained_buckets) < len(unit.buckets))
        what = f"units still gathered when their gradients are final, with reshard_after_forward={reshard}"
        found = f"{', '.join(left)} ({frozen} is freed later, as it has frozen weights: it is not looked at here)"
        sheet.expect(not left, what, "none", found)
        left.clear()
    _order_of_events(sheet, cls, backward=True)
    for prefetch in (0, 1):
        means = f"{1 + prefetch} unit(s)' parameters and 1 unit's gradients of {LAYER:,} each"
        _worst_moment(sheet, (2 + prefetch) * LAYER, means, cls, prefetch=prefetch)


@move("order", "zero3", step=3)
def zero3_gradients_final(sheet: Sheet) -> None:
    """Each trained bucket is reduced once, right after its unit's backward, and two of whole gradients are alive."""
    gradients(sheet)
    model = sheet.odd()
    model.blocks[0].pair.data = model.blocks[0].pair.data.float()  # two dtypes in a unit are two buckets
    engine = sheet.build(model)
    sheet.backward(engine)
    engine._reduce_gradients()
    sheet.right_gradients(engine)
    zero3_order(sheet)
    for prefetch in (0, 1) if not sheet.findings else ():
        means = f"{1 + prefetch} unit(s)' parameters and 2 units' gradients of {LAYER:,} each"
        _worst_moment(sheet, (3 + prefetch) * LAYER, means, prefetch=prefetch)


# All together.


@move("values", "zero1", "zero2", "zero3")
def all_steps_train(sheet: Sheet) -> None:
    """Training is that of one process on all data, and sends what the stage promises."""
    steps = 4
    plain, losses = sheet.oracle(steps)
    engine = sheet.build_odd()
    for step in range(steps):
        inputs, targets = sheet.batch(step)
        with sheet.listen() as traffic:
            loss = engine.training_step(inputs, targets, F.cross_entropy)
        mean = parts.mean_over_ranks(loss.detach())
        sheet.same(f"the ranks' mean loss in training step {step + 1}", mean, losses[step])
        if sheet.findings:
            return
    sent = [param for param in plain.parameters() if param.requires_grad or sheet.name == "zero3"]
    psi = 8 * sum(param.numel() for param in sent)
    kinds, times = sheet.promise.kinds, sheet.promise.times
    sheet.traffic(traffic, kinds, times, psi + sheet.padding(engine.buckets), "in a training step")
    found = engine.full_state_dict()
    for name, expected in plain.state_dict().items():
        sheet.same(f"the weight {name} on this rank", found.get(name), expected.cpu())


@move("bytes", "zero1", "zero2", "zero3")
def all_steps_hold(sheet: Sheet) -> None:
    """When the optimizer runs, each kind takes what the stage promises, and nothing else is alive."""
    batches = [sheet.vectors(step) for step in range(2)]
    held, total, cut = {}, LAYERS * LAYER, sheet.promise.cut
    with sheet.ledger() as (ledger, engine):
        for tensor in itertools.chain(*batches):
            ledger.track(tensor)
        outside = sum(tensor.untyped_storage().nbytes() for tensor in itertools.chain(*batches))
        engine.training_step(*batches[0], F.mse_loss)
        loss = F.mse_loss(engine(batches[1][0]), batches[1][1])
        loss.backward()

        def look(*_):
            held.update(held_bytes(engine), live=ledger.live - outside)

        engine.optimizer.register_step_pre_hook(look)
        engine.step()
        engine.zero_grad()
        between = ledger.live - outside
    if not held:
        return sheet.expect(False, "engine.step()", "a step of engine.optimizer", "none")
    live, slack, noise = held.pop("live"), sheet.padding(engine.buckets), 64 + loss.untyped_storage().nbytes()
    for kind in ("parameters", "gradients", "optimizer"):
        psis = 2 if kind == "optimizer" else 1
        # The whole gradients stay in their buffer, and the mean comes into another one.
        more = total / sheet.world_size if kind == "gradients" and sheet.name == "zero1_2psi" else 0
        allowed = psis * total / (sheet.world_size if kind in cut else 1) + more + psis * slack
        allowed += 4 * 2 * LAYERS if kind == "optimizer" else 0  # AdamW's counters
        means = f"{4 * psis}Ψ{'/N' * (kind in cut)}{' + 4Ψ/N' * bool(more)}, and padding"
        sheet.at_most(f"{kind} held in step 4", held[kind], allowed, means)
    means = "what is held, by name, and a loss"
    sheet.at_most("bytes alive in step 4", live, sum(held.values()) + noise, means)
    keeps = 0 if "gradients" in cut else total + slack
    allowed, means = held["parameters"] + held["optimizer"] + keeps + noise, "parameters, optimizer state"
    sheet.at_most("bytes alive between two steps", between, allowed, means + ", the gradients' buffer" * bool(keeps))


# The checks of a class that is written step by step, in the order of the steps; ALL_STEPS are asked at the end.
MOVES = {
    "zero1": (zero1_layout, zero1_cut, zero1_gradients, zero1_update, zero1_gather),
    "zero1_2psi": (zero1_gradients,),
    "zero2": (zero2_send, zero2_receive, zero2_in_flight, zero2_turns, zero2_clip),
    "zero3": (zero3_units, zero3_free, zero3_gather, zero3_before_forward, zero3_before_backward,
              zero3_after_backward, zero3_gradients_final),
}  # fmt: skip
ALL_STEPS = (all_steps_train, all_steps_hold)
