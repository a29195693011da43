"""What each move of a stage must do, looked at alone: values against plain PyTorch, bytes, order of collectives.

A check is a function of a `Sheet`, run on every rank, and writes down what differs from what is expected. It looks at
one step, alone where the others would hide its mistakes, and else in a class that is whole: of that it asks the other
properties, too. A class that is written step by step can be asked: `./launch.sh check` has the chapter's code in the
place of the steps that are not written yet.
"""

import itertools
import math
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.engine import guard
from harness.engine.units import default_units, parameters_by_unit
from harness.engine.waiting import label
from harness.properties import held, loops, parts, peaks, precision, unused, values
from harness.properties.layout import alignment, padded
from harness.properties.models import Lanes
from harness.properties.sheet import EXACT, LAYER, LAYERS, MIXED_AT, ROUNDED, SMALL, Recorder, Sheet, move

# Step 0, with no rank needed.

SHAPES = [[(6,)], [()], [(5,), (3,), (1,)], [(2, 2), (4,)], [(5, 7), (7,), (9, 5), (), (2,)], [(17,)], [(8, 8), (8,)]]
DTYPES = [(torch.float32, None), (torch.float64, None), (torch.float32, torch.bfloat16)]


def _buckets(sheet: Sheet, dtypes, world_sizes, shapes_of):
    """(what it is, its parameters, world size, rank, bucket) of many layouts, until something is found."""
    for (dtype, param_dtype), world_size, shapes in itertools.product(dtypes, world_sizes, shapes_of):
        zeros = [torch.zeros(shape, dtype=dtype, device=sheet.device) for shape in shapes]
        named = [(f"p{i}", nn.Parameter(zero)) for i, zero in enumerate(zeros)]
        said = ", ".join(" x ".join(map(str, shape)) or "()" for shape in shapes)
        at = f"N = {world_size}, parameters of {said} elements, {str(dtype)[6:]}"
        at += f" with param_dtype {str(param_dtype)[6:]}" * (param_dtype is not None)
        for rank in range(world_size):
            if not sheet.findings:
                yield at, named, world_size, rank, sheet.chapter.Bucket(named, rank, world_size, (param_dtype, None))


@move("bytes", "zero1", step=0)
def zero1_layout(sheet: Sheet) -> None:
    """Parameters lie end to end on 16-byte boundaries, in N equal shards, with no more padding than needed.

    On a GPU they are of 256 bytes.
    """
    shapes_of = [*SHAPES, [(0,)], [(3,), (0, 2), (2,)]]
    for at, named, world_size, rank, bucket in _buckets(sheet, DTYPES, (2, 3, 4, 7, 1), shapes_of):
        sizes = [param.numel() for _, param in named]
        start = alignment(sheet.device.type)
        align = start // min(bucket.param_dtype.itemsize, named[0][1].dtype.itemsize)
        most = max(padded(sizes, world_size, align)[0], align * world_size)
        offsets, whole = list(bucket.offsets), bucket.shard_numel * world_size
        if len(offsets) != len(sizes):
            return sheet.expect(False, f"offsets at {at}", f"{len(sizes)} of them", offsets)
        unaligned = [offset for offset in (*offsets, bucket.shard_numel) if offset % align]
        sheet.equal(f"offsets and shard_numel at {at}", unaligned, [], f"multiples of {align} ({start} bytes)")
        ends = [offset + size for offset, size in zip(offsets, sizes)]
        apart = offsets[0] >= 0 and all(a <= b for a, b in zip(ends, offsets[1:]))
        sheet.expect(apart, f"offsets at {at}", "one parameter behind the other, none over another", offsets)
        sheet.equal(f"numel at {at}", bucket.numel, whole, f"N x shard_numel = {whole}")
        least = max(1, *ends)
        room = f"room for all, so {least} or more, and no more padding than needed, so {most} at most"
        sheet.expect(least <= bucket.numel <= most, f"numel at {at}", room, bucket.numel)
        sheet.equal(f"start of rank {rank} at {at}", bucket.start, rank * bucket.shard_numel)


@move("values", "zero1", step=0)
def zero1_cut(sheet: Sheet) -> None:
    """The parts of all ranks' shards are views, and hold every element of every parameter exactly once."""
    found = {}
    for at, named, world_size, rank, bucket in _buckets(sheet, DTYPES[:1], (2, 3, 5, 1), SHAPES):
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


# Gradients, of all stages.


def _keeping_in_flight(sheet: Sheet):
    """The class under test, whose `gradients_final` must return before what it has sent is received."""

    def gradients_final(self, part) -> None:
        first = len(Recorder.issued)
        sheet.engine_cls.gradients_final(self, part)
        sent = [each for each in Recorder.issued[first:] if each.kind == "reduce-scatter"]
        whose = f"unit {part.name!r}" if hasattr(part, "name") else label(part)
        means = "in flight: the next _send receives it, and backward goes on"
        what = f"the last reduce-scatter when gradients_final of {whose} returns"
        sheet.expect(not sent or not sent[-1].waited, what, means, "received already")

    return sheet.probe(gradients_final=gradients_final)


def gradients(sheet: Sheet) -> None:
    """Backward and step 3 leave the right gradients on the pieces, however many backwards there were."""
    kind, times = sheet.promise.kind, sheet.promise.times
    in_backward = sheet.name in ("zero2", "zero3")  # is where step 3 is
    twice, unsent = ", after two backwards", ", after a backward under no_sync() and another"
    for options in sheet.setups((twice, {}), (unsent, {}), (", with find_unused=True", {"find_unused": True})):
        engine = sheet.build_odd(_keeping_in_flight(sheet) if in_backward else None, **options)
        passes = 2 if sheet.at in (twice, unsent) else 1
        sending = 2 if sheet.at == twice and in_backward else 1  # backwards that send
        with sheet.listen("backward and step 3") as issued:
            if sheet.at == unsent:
                with engine.no_sync():
                    sheet.backward(engine)
            for _ in range(2 if sheet.at == twice else 1):
                sheet.backward(engine)
            if in_backward:
                once = len(engine.trained_buckets) * sending
                inside = sum(each.kind == kind for each in issued)
                sheet.equal("reduce-scatters inside backward", inside, once, f"{once}: one per bucket and backward")
            engine._reduce_gradients()
        sheet.right_gradients(engine, times=passes)
        if options.get("find_unused"):
            issued.pop()  # which parameters were used
        if sheet.name == "zero3":  # in forward and in backward; the root for both together
            gathers = sum(each.kind == "all-gather" for each in issued)
            once = (2 * len(engine.buckets) - len(engine.root.buckets)) * passes
            said = f"{once}: one per bucket in forward and one in backward, but for the root; none for what was freed "
            sheet.equal("all-gathers of forward and backward", gathers, once, said + "too early")
        issued = [each for each in issued if each.kind != "all-gather" or sheet.name != "zero3"]
        nbytes = sum(bucket.numel * bucket.reduce_dtype.itemsize for bucket in engine.trained_buckets)
        sheet.traffic(issued, [kind], times * sending, nbytes, "for the gradients")


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
    scattered = sheet.promise.kind == "reduce-scatter"
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
    weights = dict(sheet.oracle().named_parameters())
    for name, piece, part in sheet.pieces(engine):
        sheet.same(f"this rank's piece of {name} after the update", piece, weights[name].detach().flatten()[part])
    said = f"one, of the {len(engine.trained_buckets)} trained buckets: what is frozen has not changed"
    found = " and ".join(f"one of {len(buckets)} buckets" for buckets, _ in gathered) or "none"
    right = [buckets for buckets, _ in gathered] == [engine.trained_buckets]
    sheet.expect(right, "calls of gather_parameters", said, found)
    elsewhere = [group for _, group in gathered if group is not engine.group]
    sheet.expect(not elsewhere, "the group that gather_parameters is given", "self.group", "another one")


def _still_views(sheet: Sheet, bucket) -> None:
    for name, param, view in zip(bucket.names, bucket.params, bucket.views(bucket.flat)):
        still = type(param) is not nn.Parameter or param.data_ptr() == view.data_ptr()  # a guarded one is not asked
        sheet.expect(still, f"the weight {name}", "still a view of bucket.flat", "a tensor of its own")


@move("values", "zero1", step=5)
def zero1_gather(sheet: Sheet) -> None:
    """Step 5 brings every shard into all ranks' weights, which stay views, with one all-gather and no copy."""
    for options in sheet.setups():
        engine = sheet.build_odd(**options)
        right = [torch.arange(bucket.numel, device=sheet.device) / 16 for bucket in engine.buckets]
        for bucket, whole in zip(engine.buckets, right):
            bucket.flat.zero_()
            bucket.shard.copy_(whole[bucket.start : bucket.start + bucket.shard_numel])
        with sheet.listen("step 5") as issued:
            sheet.chapter.gather_parameters(engine.buckets, engine.group)
        for bucket, whole in zip(engine.buckets, right):
            for name, param, expected in zip(bucket.names, bucket.params, bucket.views(whole)):
                sheet.same(f"the weight {name} on this rank", param, expected)
            _still_views(sheet, bucket)
        sheet.traffic(issued, ["all-gather"], 1, sum(bucket.flat.nbytes for bucket in engine.buckets), "in step 5")
    with sheet.ledger() as (memory, engine):
        sheet.chapter.gather_parameters(engine.buckets, engine.group)
    means = "at most a shard, 4Ψ/N: gather into bucket.flat itself"
    sheet.at_most("bytes alive in step 5, more than before", memory.most, sheet.share(engine.buckets), means)
    sheet.at_most("bytes alive after step 5, more than before", memory.more, 0, "none")


# ZeRO-2.


def _with_own_gradients(sheet: Sheet, options):
    """(engine, {parameter: this rank's own gradient}), which every `param.grad` is, as backward would leave it."""
    engine, plain, own = sheet.build_odd(**options), sheet.start(), {}
    sheet.backward(plain)
    for bucket in engine.trained_buckets:
        for name, param in zip(bucket.names, bucket.params):
            own[param] = plain.get_parameter(name).grad.to(param.dtype)
            param.grad = own[param].clone()
    return engine, own


@move("values", "zero2", step=3)
def zero2_send(sheet: Sheet) -> None:
    """A reduction starts one reduce-scatter of all that a bucket has, zeros for what is missing, and takes it away."""
    for options in sheet.setups():
        engine, own = _with_own_gradients(sheet, options)
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
            with sheet.listen(copies=True) as issued:
                reduction = sheet.chapter.Reduction(bucket, sheet.group)
            sheet.in_flight("the reduce-scatter when Reduction() returns", issued)
            sheet.traffic(issued, ["reduce-scatter"], 1, right.nbytes, f"for a bucket of {right.nbytes} bytes")
            sent = torch.cat([each.given for each in issued]) if issued else right[:0]
            sheet.equal("the dtype of what is sent", sent.dtype, right.dtype)
            sheet.equal("elements that are sent", len(sent), len(right))
            if not sheet.findings:
                for name, a, b in zip(bucket.names, bucket.views(sent), bucket.views(right)):
                    what = f"what is sent of {name} (gradients.take: param.grad, zeros for None, and bucket.kept)"
                    sheet.same(what, a, b, ROUNDED if sent.dtype == torch.bfloat16 else EXACT)
                sheet.same("the buffer that is sent, with its padding", sent, right, ROUNDED)
            left = [name for name, param in zip(bucket.names, bucket.params) if param.grad is not None]
            sheet.none("parameters with a .grad after sending", left)
            sheet.equal("gradients left in bucket.kept", len(bucket.kept), 0, "none")
            dist.barrier(sheet.group)  # before its buffers go
            del reduction


@move("values", "zero2", step=3)
def zero2_receive(sheet: Sheet) -> None:
    """A reduction that has finished has added the mean to the pieces, and holds nothing of the whole buffer."""
    for options in sheet.setups():
        engine, own = _with_own_gradients(sheet, options)
        for times in (1, 2):  # a second backward before the step adds up
            with sheet.listen("Reduction"):
                for bucket in engine.trained_buckets:
                    for param in bucket.params:
                        param.grad = own[param].clone()
                    sheet.chapter.Reduction(bucket, sheet.group).finish(len(sheet.ranks))
            sheet.right_gradients(engine, times=times)
    with sheet.ledger() as (memory, engine):
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
        engine, _ = _with_own_gradients(sheet, options)
        with sheet.listen("self._send and self._receive") as issued:
            for bucket in engine.trained_buckets:
                before = len(issued)
                engine._send(bucket)
                sheet.in_flight("the reduce-scatter of a bucket when _send returns", issued[before:])
            engine._receive()
        sheet.right_gradients(engine)
        sizes = [bucket.numel * bucket.reduce_dtype.itemsize for bucket in engine.trained_buckets]
        sheet.equal("bytes of the collectives", sheet.sizes(issued), sizes)
        sheet.traffic(issued, ["reduce-scatter"], 1, sum(sizes), "for all buckets")
    sheet.ask(peaks.zero2_has_two_buckets_of_whole_gradients_at_most, reverse=False)


@move("order", "zero2", step=3)
def zero2_turns(sheet: Sheet) -> None:
    """Backward sends every bucket once, in one order, and two are whole at most."""
    gradients(sheet)
    for reverse in (False, True):  # gradients that finish in the opposite order must not change that of the buckets
        sheet.ask(held.buckets_are_reduced_in_one_order, reverse=reverse)
    sheet.ask(peaks.zero2_has_two_buckets_of_whole_gradients_at_most, reverse=False)


@move("values", "zero2", step=3)
def zero2_clip(sheet: Sheet) -> None:
    """Clipping scales all pieces by the norm of the whole gradient, which is the same on every rank, as is its NaN."""
    what = "the norm that is returned with max_norm 0.05, norm_type 2"
    for options in sheet.setups():
        engine = sheet.build_odd(**options)
        sheet.backward(engine)
        engine._reduce_gradients()
        with sheet.listen() as issued:
            norm = engine.clip_grad_norm_(0.05)
        expected = torch.nn.utils.get_total_norm([each for each in sheet.gradients().values() if each is not None])
        norm = torch.tensor(norm) if isinstance(norm, float) else norm
        norms = sheet.of_all_ranks(norm.item() if isinstance(norm, torch.Tensor) and norm.numel() == 1 else math.nan)
        if len(sheet.ranks) > 1 and len({f"{each:.9g}" for each in norms}) > 1:
            found = ", ".join(f"{each:.6g} on rank {rank}" for rank, each in enumerate(norms))
            found = f"the ranks' norms differ: {found}. Is it the norm of each rank's own shards?"
            sheet.expect(False, what, f"{expected.item():.6g} on every rank", found)
        sheet.same(what, norm, expected, ROUNDED if sheet.at == MIXED_AT else EXACT)
        outside = [each.kind for each in issued if each.group is not sheet.group]
        sheet.none("collectives of clipping that are not in group=self.group", outside)
        means = "some numbers per rank, and no gradients"
        sheet.at_most("bytes of clipping's collectives", sum(sheet.sizes(issued)), 64 * sheet.world_size, means)
    norm = torch.nn.utils.get_total_norm([each for each in sheet.gradients().values() if each is not None]).item()
    for max_norm in (0.05, 1e6):
        sheet.at = f", after clip_grad_norm_({max_norm:g}) of a norm of {norm:.3g}"
        engine = sheet.build_odd()
        sheet.backward(engine)
        engine.clip_grad_norm_(max_norm)
        arrived = "received before the norm is taken, as its gradients count too: self._reduce_gradients()"
        sheet.expect(engine._in_flight is None, "the bucket in flight when backward ends", arrived, "not received")
        sheet.right_gradients(engine, min(1, max_norm / (norm + 1e-6)))
    sheet.at = ""
    for norm_type in (2.0, math.inf, 1.0):
        sheet.ask(loops.one_ranks_nan_is_in_every_ranks_norm, value=math.nan, norm_type=norm_type)
        sheet.ask(loops.clipping_takes_the_norm_of_the_whole_model, norm_type=norm_type)
        sheet.ask(loops.a_rank_that_owns_only_padding_agrees_on_the_norm, dtypes=(None, torch.float32),
                  norm_type=norm_type)  # fmt: skip
    sheet.ask(unused.what_nobody_used_is_left_out_of_the_step, **unused.EACH)
    sheet.ask(precision.mixed_precision_is_a_rounded_copy_that_computes, model="Twice")


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
        return sorted(name for bucket in unit.buckets for name in bucket.names)

    for (said, model), given in itertools.product(models.items(), (False, True)):
        modules = [*reversed([module for module in model.modules() if not list(module.children())])] if given else None
        held, rest = parameters_by_unit(model, default_units(model) if modules is None else modules)
        names = {module: name for name, module in model.named_modules()}
        expected = {names[module]: sorted(name for name, _ in params) for module, params in held.items() if params}
        at = f"of {said}{', with the modules given' * given}"
        found = sheet.chapter.make_units(model, modules, 0, 2, (None, None))
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list)):
            said = "None: is a return missing?" if found is None else type(found).__name__
            return sheet.expect(False, f"what make_units returns {at}", "(list of units, root)", said)
        units, root = found
        sheet.equal(f"names of the units {at}", [unit.name for unit in units], list(expected))
        sheet.equal(f"parameters by unit {at}", {unit.name: names_in(unit) for unit in units}, expected)
        sheet.equal(f"parameters of the root {at}", names_in(root), sorted(name for name, _ in rest))
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
        engine._gather(unit)
        engine._wait(unit)
        flats = [bucket.flat for bucket in unit.buckets]
        saved = F.linear(inputs, unit.module.weight, unit.module.bias)  # autograd keeps a view of the weight
        pending = [_Pending(flat) for flat in flats]
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
    means = "the tensor that it was, on a storage of 0 bytes: the weights and what autograd has saved are views of it"
    sheet.expect(all(kept), "bucket.flat after freeing a unit", means, none)
    views = here == [(True, shape) for shape in shapes]
    own = "tensors of their own: was param.data set?"
    sheet.expect(views, "the weights of a unit that was freed", "still views of bucket.flat", own)
    means = "autograd holds a view of the weight, and must hold no memory with it"
    what = "bytes of gathered parameters alive after freeing a unit of a trained and a frozen bucket"
    sheet.at_most(what, left, 0, means)
    sheet.expect(unit.gathered is False, "unit.gathered after freeing", False, unit.gathered)
    means, late = "waited for, before the memory goes", "not waited for, or too late"
    sheet.expect(all(waited), "an all-gather in flight", means, late)
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
            name, works = f"unit {unit.name!r}", len(unit.buckets)
            with sheet.listen("gathering a unit") as issued:
                engine._gather(unit)
                sheet.expect(unit.gathered is True, f"unit.gathered after _gather of {name}", True, unit.gathered)
                said = f"{works}: one per bucket, not waited for yet"
                sheet.equal(f"works in unit.works after _gather of {name}", len(unit.works), works, said, read)
                if not sheet.findings:
                    sheet.in_flight(f"the all-gather of {name} when _gather returns", issued, read)
                engine._gather(unit)  # gathered already: nothing to do
                engine._wait(unit)
            found = [(each.kind, each.nbytes) for each in issued]
            expected = [("all-gather", bucket.flat.nbytes) for bucket in unit.buckets]
            said = f"{expected}: one per bucket, in bytes"
            sheet.equal(f"collectives of gathering {name}, and of _gather once more", found, expected, said)
            for bucket in unit.buckets:
                nbytes = bucket.flat.untyped_storage().nbytes()
                sheet.equal(f"bytes of the buffer of {', '.join(bucket.names)}", nbytes, bucket.flat.nbytes)
                if nbytes >= bucket.flat.nbytes:  # or reading it would be the end
                    for name, view in zip(bucket.names, bucket.views(bucket.flat)):
                        sheet.same(f"the gathered weight {name}", view, right[name].detach().to(view))
                    _still_views(sheet, bucket)
            dist.barrier(sheet.group)  # nothing is on its way any more, whoever has waited
            engine._free(unit)
    with sheet.ledger() as (memory, engine):
        engine._gather(engine.units[0])
    means = "the unit: gather into bucket.flat itself"
    sheet.at_most("bytes alive while a unit is gathered", memory.most, LAYER + sheet.padding(engine.buckets), means)


def _noting(cls: type, events: list[str]) -> type:
    """The class, whose moves and moments add to `events` what they do to which unit."""

    moments = []  # that this rank is in: one may be written by another

    def noted(method: str, verb: str, happens=lambda part: True, first: bool = True):
        def call(self, part, *upcoming) -> None:
            units = {"root": self.root, **dict(enumerate(self.units))}
            names = [name for name, unit in units.items() if part is unit or part in unit.buckets]
            event = [f"{verb} {name}" for name in names if happens(part)]
            events.extend(event * first)
            moments.extend([method] * (not first))
            getattr(cls, method)(self, part, *upcoming)
            ahead = [self.units.index(unit) for units in upcoming for unit in units if unit.works]
            events.extend(f"wait {number}" for number in ahead if self.units[number].works[0].waited)  # in another way
            events.extend(event * (not first))
            del moments[len(moments) - (not first) :]

        return call

    methods = {
        "_gather": noted("_gather", "gather", lambda unit: not unit.gathered),
        "_wait": noted("_wait", "wait", lambda unit: unit.works),
        "_free": noted("_free", "free", lambda unit: unit.gathered, first=False),  # it waits before
        "_send": noted("_send", "reduce"),
        "before_forward": noted("before_forward", "forward", lambda unit: not moments, first=False),  # then it computes
        "before_backward": noted("before_backward", "backward", lambda unit: not moments, first=False),
    }
    return type(cls.__name__, (cls,), methods)


def _expected_events(way, known, backward: bool, prefetch: int = 1, reshard_after_forward: bool = True) -> list[str]:
    """Of a step that runs the units `way`, when the one before ran them as `known`. The root runs behind them all."""
    gathered, events = {}, []

    def gather(units):
        for unit in units:
            if unit not in gathered:
                gathered[unit] = "on its way"
                events.append(f"gather {unit}")

    def use(unit, verb, free: bool):
        if gathered[unit] == "on its way":
            gathered[unit] = "there"
            events.append(f"wait {unit}")
        events.append(f"{verb} {unit}")
        if free:
            events.append(f"free {unit}")
            del gathered[unit]

    gather(["root", *known[:prefetch]])
    use("root", "forward", free=False)
    for position, unit in enumerate(way):
        gather([unit])
        if known[position : position + 1] == [unit]:
            gather(known[position + 1 : position + 1 + prefetch])
        use(unit, "forward", free=reshard_after_forward or not backward)
    back = ["root", *reversed(way)] if backward else []
    for position, unit in enumerate(back):
        gather(back[position : position + prefetch + 1])
        use(unit, "backward", free=True)
        events.append(f"reduce {unit}")
    return events + [f"free {unit}" for unit in gathered]


def _why(found: list[str], expected: list[str]) -> str:
    """What a wrong order of events may come from, if that can be told."""

    def passes(events) -> dict[str, list[str]]:
        computed = [number for number, event in enumerate(events) if event.startswith("forward")]
        end = computed[-1] + 1 if computed else len(events)
        return {"forward": events[:end], "backward": events[end:]}

    for name, events in passes(found).items():
        for place, event in enumerate(events):
            verb, unit = event.split()
            who = "the root" if unit == "root" else f"unit {unit}"
            more = events.count(event) > max(1, passes(expected)[name].count(event))
            if verb == "gather" and more:
                return f"; {who} is gathered twice: was it freed before its {name}?"
            if verb == "reduce" and more:
                return f"; {who} is reduced twice: to reduce a unit is for `gradients_final` to do"
            if verb == "reduce" and f"free {unit}" not in events[:place]:
                return f"; {who} is still gathered when its gradients are final"
    return ""


class Rooted(Lanes):
    """Units, and a layer behind them that is in none."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(super().forward(x))


@move("order", "zero3")
def zero3_order(sheet: Sheet) -> None:
    """Units are gathered `prefetch` ahead, waited for, used, freed and reduced in one order, also where it changes."""
    # As declared, again, another way, that again, and a longer way, without gradients.
    ways = [[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 1, 3], [2, 0, 1, 3], [2, 0, 1, 3, 0]]
    for options in ({"prefetch": 1}, {"prefetch": 0}, {"prefetch": 2}, {"reshard_after_forward": False}):
        model, events = parts.seeded(Rooted, dtype=torch.float32, device=sheet.device), []
        engine = sheet.build(model, _noting(sheet.engine_cls, events), **options)
        ahead = {} if sheet.world_size > 1 else {"prefetch": 0}  # a rank that is alone waits for nothing
        said = " and ".join(f"{name}={value}" for name, value in options.items())
        for step, (known, way) in enumerate(zip([ways[0], *ways], ways), 1):
            model.way, backward = way, len(way) == len(model.blocks)
            events.clear()
            with torch.set_grad_enabled(backward):
                loss = engine(sheet.vectors(step, width=8)[0]).square().mean()
            if backward:
                loss.backward()
            expected = _expected_events(way, known, backward, **{**options, **ahead})
            if events != expected and not sheet.findings:
                pairs = itertools.zip_longest(events, expected)
                at = max(0, next(i for i, (found, right) in enumerate(pairs) if found != right) - 2)
                before = "..., " * bool(at)
                show = [before + (", ".join(each[at : at + 8]) or "nothing") for each in (expected, events)]
                as_what = "as in the step before" if known == way else f"and in the step before ran {known}"
                what = f"order of events with {said}, in step {step}: forward runs the units {way}, "
                what += "as the model declares them" if step == 1 else as_what
                sheet.expect(False, what, show[0], show[1] + _why(events, expected))
            engine.zero_grad()


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
    for prefetch in (0, 1):
        sheet.ask(peaks.zero3_has_only_the_units_in_use_gathered, options={"prefetch": prefetch})


# All together.


@move("values", "zero1", "zero2", "zero3")
def all_steps_train(sheet: Sheet) -> None:
    """Training is that of one process on all data, and sends what the stage promises."""
    options = {} if sheet.name == "zero3" else SMALL
    sheet.ask(values.equals_one_process_on_the_whole_batch, options=options)
    engine = sheet.build_odd()
    for step in range(2):
        with sheet.listen() as issued:
            engine.training_step(*sheet.batch(step), F.cross_entropy)
    kinds, times = [sheet.promise.kind, "all-gather"], sheet.promise.times + (2 if sheet.name == "zero3" else 1)
    kinds = kinds[::-1] if sheet.name == "zero3" else kinds
    sent = [param for param in engine.model.parameters() if param.requires_grad or sheet.name == "zero3"]
    with torch._C.DisableTorchFunctionSubclass():  # they are freed
        psi = 8 * sum(param.numel() for param in sent)
    sheet.traffic(issued, kinds, times, psi + sheet.padding(engine.buckets), "in a training step")


@move("bytes", "zero1", "zero2", "zero3")
def all_steps_hold(sheet: Sheet) -> None:
    """When the optimizer runs, each kind takes what the stage promises, and nothing else is alive."""
    sheet.ask(held.held_bytes_equal_the_theory)


# The checks of a class that is written step by step, in the order of the steps; ALL_STEPS are asked at the end.
MOVES = {
    "zero1": (zero1_layout, zero1_cut, zero1_gradients, zero1_update, zero1_gather),
    "zero1_2psi": (zero1_gradients,),
    "zero2": (zero2_send, zero2_receive, zero2_in_flight, zero2_turns, zero2_clip),
    "zero3": (zero3_units, zero3_free, zero3_gather, zero3_order, zero3_order, zero3_order, zero3_gradients_final),
}
ALL_STEPS = (all_steps_train, all_steps_hold)
