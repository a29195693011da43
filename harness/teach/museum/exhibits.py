"""The museum of bugs: real mistakes, each a few lines that go in front of a right stage from outside.

Every exhibit is a class made from a right stage, and wrong in one place. Many were found in public implementations,
two in the articles; nearly all train without a complaint. `./launch.sh bug` lists them, and `./launch.sh bug 7` runs
one beside the right engine (`visit.py`). tests/test_museum.py demands that each lacks the properties it names.
"""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import CPUOffloadPolicy

import zero1
import zero2
import zero3
from harness.engine import checkpoint, gradients, guard, interface, optimizer, placement, unit_hooks
from harness.engine.waiting import wait
from harness.run.engines import STAGES

ORACLE = "equals_one_process_on_the_whole_batch"


@dataclass(frozen=True)
class Exhibit:
    """One mistake: what a visitor is told before (title) and after (the rest), and how it is run.

    `wrong` is the engine, made from the stage that is `right`. `differs` is the symptom: the lines of the report that
    are not those of the right engine; or "error", or "timeout". `caught_by` names the properties that it does not have.
    `options` go to the engine, and `training` to `loop.Training`: the loop in which the mistake shows.
    """

    number: int
    title: str
    wrong: type
    differs: set[str]
    diagnosis: str
    read: str
    caught_by: tuple[str, ...] = (ORACLE,)
    options: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)

    @property
    def symptom(self) -> str:
        return f"what differs from the right engine: {', '.join(sorted(self.differs)) or 'nothing'}"

    @property
    def stage(self) -> str:
        return next(name for name, right in STAGES.items() if issubclass(self.wrong, right))

    @property
    def right(self) -> type:
        return STAGES[self.stage]


# What the lines of an exhibit may use, in words.
PATCHED = "# `patch.object(module, name, other)(method)`: this method, and while it runs, module.name is the other one."

EXHIBITS: dict[int, Exhibit] = {}


def exhibit(title: str, **told):
    """Above a wrong engine: makes it the museum's next exhibit."""

    def show(wrong: type) -> type:
        number = len(EXHIBITS) + 1
        EXHIBITS[number] = Exhibit(number, title, wrong, **told)
        return wrong

    return show


def exhibit_of(number: str) -> Exhibit:
    """The exhibit with the number that somebody has typed. Raises ValueError if there is none."""
    if not number.isdecimal() or int(number) not in EXHIBITS:
        raise ValueError(f"no bug {number!r}; there are 1 to {len(EXHIBITS)}, ./launch.sh bug lists them")
    return EXHIBITS[int(number)]


def save(engine, folder) -> None:
    """Save a checkpoint: as an exhibit does it that has a way of its own, else as is right."""
    getattr(type(engine), "save", checkpoint.save)(engine, folder)


def load(engine, folder) -> None:
    getattr(type(engine), "load", checkpoint.load)(engine, folder)


def hand_out(bucket, shard: torch.Tensor) -> None:
    """Give the optimizer's pieces their parts of this rank's shard of the gradients, as every stage does."""
    for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
        piece.grad = gradient


# ZeRO-1.


@exhibit(
    "The learning rate that was tuned on one GPU",
    differs={"losses", "norms"},
    diagnosis="The all-reduced gradients are summed and never divided by N, so the learning rate grows with the number "
    "of ranks. AdamW hides it, because it divides a gradient by its own size; SGD and clipping do not. With a "
    "small learning rate the longer steps even look better.",
    read="zero1.py, step 3, `ZeRO1._reduce_gradients`: `precision.mean_of_sum(bucket.flat_gradient, self.world_size)`",
    caught_by=("a_step_on_integers_is_exact",),
    training={"optimizer": "SGD", "max_norm": 100.0},
)
class NeverAveraged(zero1.ZeRO1):
    def _reduce_gradients(self):
        if self.hooks.reduced:
            return
        for bucket in self.trained_buckets:
            dist.all_reduce(bucket.flat_gradient, group=self.group)
            hand_out(bucket, bucket.own_part(bucket.flat_gradient))  # the sum of N gradients
        self.hooks.reduced = True


@exhibit(
    "It ran on the author's model",
    differs={"error"},
    diagnosis="The flat buffer is not padded, so the last rank's shard is shorter than the others. That works only "
    "while the length is a multiple of N (here of 4N elements, as shards start at multiples of 16 bytes). The "
    "WordPress developer's piece cuts every parameter like this. The printed ZeRO-1 of 'AI in Multiple GPUs' pads the "
    "parameter and not its gradient: there, too, N must divide.",
    read="zero1.py, step 0, `Bucket.__init__`: `self.numel` and `self.shard_numel`",
)
class NotPadded(zero1.ZeRO1):
    class Bucket(zero1.Bucket):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.numel = self.offsets[-1] + self.params[-1].numel()  # not rounded up to a multiple of N

    __init__ = patch.object(zero1, "Bucket", Bucket)(zero1.ZeRO1.__init__)


@exhibit(
    "One seed per rank",
    differs={"losses"},
    diagnosis="Nobody broadcasts rank 0's weights at the start. After the first all-gather all ranks agree, on a "
    "patchwork: each shard comes from its owner's own initialisation.",
    read="zero1.py, step 0, `ZeRO1.__init__`: `dist.broadcast`",
)
class NotBroadcast(zero1.ZeRO1):
    # No `dist.broadcast` in step 0.
    __init__ = patch.object(dist, "broadcast", lambda *arguments, **options: None)(zero1.ZeRO1.__init__)


@exhibit(
    "A third of the traffic saved",
    differs={"losses", "sent"},
    diagnosis="Every rank all-reduces its own shard of the gradients: rank 0's shard 0 is added to rank 1's shard 1. "
    "The sizes match, so nothing complains. A sum of one's own shard over the ranks is a reduce-scatter.",
    read="zero1.py, step 3, `ZeRO1._reduce_gradients`: the whole buffer goes into the all-reduce",
)
class DifferentShards(zero1.ZeRO1):
    def _reduce_gradients(self):
        for bucket in self.trained_buckets:
            shard = bucket.own_part(bucket.flat_gradient)  # rank 0's shard 0, rank 1's shard 1
            dist.all_reduce(shard, group=self.group)
            hand_out(bucket, shard.div_(self.world_size))


@exhibit(
    "Five steps, five batches, one model",
    differs={"losses", "optimizer", "peak in forward", "peak in backward"},
    diagnosis="The optimizer steps before the gradients are reduced. Its pieces have no gradient yet, so it does "
    "nothing; when they get one, zero_grad() follows.",
    read="zero1.py, steps 3 and 4, `ZeRO1.step`",
)
class UpdatedTooEarly(zero1.ZeRO1):
    def step(self):
        self.optimizer.step()  # step 4
        self._reduce_gradients()  # step 3
        zero1.gather_parameters(self.trained_buckets, self.group)  # step 5


@exhibit(
    "Two models for the price of one",
    differs={"losses", "sent", "all-gathers"},
    diagnosis="Step 5 is left out. Every rank updates its shard of the weights and never gets the others' shards. Its "
    "own half of the model is new, and the other half never changes.",
    read="zero1.py, step 5, `gather_parameters`",
)
class NotGathered(zero1.ZeRO1):
    step = patch.object(zero1, "gather_parameters", lambda buckets, group: None)(zero1.ZeRO1.step)


@exhibit(
    "Counting from one",
    differs={"losses"},
    diagnosis="Step 5 contributes the shard of rank + 1, which this rank has not updated. The all-gather puts every "
    "shard in another's place, without its update; the next one puts them back where they were.",
    read="zero1.py, step 5, `gather_parameters`; `Bucket.own_part`: `self.start`",
)
class NextRanksShard(zero1.ZeRO1):
    @staticmethod
    def gather(buckets, group):
        for bucket in buckets:
            start = (dist.get_rank(group) + 1) % dist.get_world_size(group) * bucket.shard_numel  # ranks counted from 1
            shard = bucket.flat[start : start + bucket.shard_numel].clone()
            dist.all_gather_single(bucket.flat, shard, group=group)

    step = patch.object(zero1, "gather_parameters", gather)(zero1.ZeRO1.step)


@exhibit(
    "Equal to the last digit",
    differs={"optimizer", "peak in forward", "peak in backward"},
    diagnosis="The optimizer is built over whole parameters on every rank. All ranks compute the same update of "
    "everything, and the all-gather brings what everybody has. It is DDP, with more traffic.",
    read="zero1.py, step 0, `Bucket.make_pieces`; `ZeRO1.__init__`: `self.optimizer`",
    caught_by=("held_bytes_equal_the_theory",),
)
class WholeOptimizer(zero1.ZeRO1):
    def __init__(self, model, optimizer_cls, **options):
        super().__init__(model, optimizer_cls, **options)
        for bucket in self.trained_buckets:  # the optimizer is handed whole parameters, on every rank
            bucket.start, bucket.shard_numel, bucket.shard = 0, bucket.numel, bucket.flat
            bucket.make_pieces(self.placement)
        self.optimizer = optimizer.over_pieces(self, optimizer_cls)

    @staticmethod
    def gather(buckets, group):
        for bucket in buckets:
            shard = bucket.flat.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
            dist.all_gather_single(bucket.flat, shard, group=group)

    step = patch.object(zero1, "gather_parameters", gather)(zero1.ZeRO1.step)


@exhibit(
    "The parameter of one element",
    differs={"timeout"},
    diagnosis="A rank that owns nothing but a bucket's padding skips its all-gather. The others wait for it there, and "
    "it waits for them in the next step's all-reduce. A collective needs all ranks, also those with nothing to give.",
    read="zero1.py, step 5, `gather_parameters`",
    caught_by=("a_rank_may_own_only_padding",),
    options={"bucket_mb": 0},
)
class NothingToGather(zero1.ZeRO1):
    @staticmethod
    def gather(buckets, group, right=zero1.gather_parameters):
        right([bucket for bucket in buckets if bucket.pieces], group)  # only where this rank updated some

    step = patch.object(zero1, "gather_parameters", gather)(zero1.ZeRO1.step)


@exhibit(
    "Two opinions about a norm",
    differs={"losses", "norms", "all-gathers"},
    diagnosis="Every rank clips by the norm of its own shard. The right norm is that of all shards together: the "
    "squares must be summed over the ranks. Otherwise every shard is scaled by another factor.",
    read="harness/engine/gradients.py, `clip_grad_norm_`",
    caught_by=("clipping_takes_the_norm_of_the_whole_model",),
    training={"optimizer": "SGD", "max_norm": 0.5},
)
class OwnNorm(zero1.ZeRO1):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        self._reduce_gradients()
        pieces = [piece for bucket in self.trained_buckets for _, piece in bucket.pieces]
        return torch.nn.utils.clip_grad_norm_(pieces, max_norm, norm_type)


@exhibit(
    "Momentum from nowhere",
    differs={"losses"},
    diagnosis="The gradients' buffer stays from step to step. The hook adds to it, and does not ask whether what is in "
    "it comes from this step. The sum of all steps' gradients is a momentum that nobody asked for.",
    read="zero1.py, step 2, `ZeRO1.on_gradient`: `bucket.used`",
    training={"optimizer": "SGD"},
)
class OldGradients(zero1.ZeRO1):
    def on_gradient(self, bucket, index):
        # Always added, also to what the step before has left there.
        bucket.gradient_views[index].add_(guard.take_gradient(bucket.params[index]))
        bucket.used.add(index)


# ZeRO-2.


@exhibit(
    "Half of the batch",
    differs={"losses"},
    diagnosis="What arrives from a reduction replaces what an earlier backward of the same step has brought. It should "
    "be added: as it is, only the last micro-batch counts.",
    read="zero2.py, the end of step 3, `add_to_pieces`: `piece.grad.add_(gradient)`",
    caught_by=("backward_may_be_called_in_any_way",),
    training={"optimizer": "SGD", "micro_batches": 2},
)
class LastMicroBatch(zero2.ZeRO2):
    def _receive(self):
        if self._in_flight is not None:
            for _, piece in self._in_flight.bucket.pieces:
                piece.grad = None  # `piece.grad = gradient`, where an earlier backward may have left one
        super()._receive()


@exhibit(
    "What the log said",
    differs={
        "peak in backward",
        "reductions sent inside backward",
        "reductions that travel while the rank computes",
    },
    diagnosis="The hook reduces nothing, and step() reduces everything: all gradients, unsharded, are alive when "
    "backward ends. Between steps 1/N of them is held, and that is what the log says. The peak tells the truth.",
    read="zero2.py, step 3 inside step 2, `ZeRO2.gradients_final`",
    caught_by=("zero2_has_two_buckets_of_whole_gradients_at_most",),
)
class ReducedAtTheEnd(zero2.ZeRO2):
    def gradients_final(self, bucket):
        pass  # inside backward nothing is sent

    def _reduce_gradients(self):
        for bucket in self.trained_buckets:
            self._send(bucket)
        super()._reduce_gradients()


@exhibit(
    "An allocation saved",
    differs={"gradients", "peak in backward"},
    diagnosis="The reduced shard is received into its place in the buffer that was sent. It is a view, and a view "
    "keeps the whole storage alive: nothing is freed, although no variable names the buffer any more.",
    read="zero2.py, step 3, `Reduction`: `self.shard`, and `self.flat = None`",
    caught_by=("held_bytes_equal_the_theory",),
)
class ReceivedInPlace(zero2.ZeRO2):
    def _receive(self):
        reduction = self._in_flight
        if reduction is not None:
            wait(reduction.work, "reduce-scatter", reduction.bucket)
            # This rank's part of the buffer that was sent is free by now, so why allocate another?
            reduction.shard = reduction.bucket.own_part(reduction.flat).copy_(reduction.shard)
        super()._receive()


@exhibit(
    "The fast one",
    differs={"losses"},
    diagnosis="Nobody waits for the asynchronous reduce-scatter. The optimizer gets memory that is not written yet: "
    "the losses are wrong in every run in another way, and perhaps NaN.",
    read="zero2.py, step 3, `Reduction.finish`: `wait`",
)
class NotWaitedFor(zero2.ZeRO2):
    def _send(self, bucket):
        super()._send(bucket)
        self._in_flight.work = SimpleNamespace(wait=lambda: None)  # what `async_op=True` returned is dropped


@exhibit(
    "The calmest gradients in the house",
    differs={"losses", "norms", "all-gathers"},
    diagnosis="torch.nn.utils.clip_grad_norm_(model.parameters()) finds no gradient. They were reduced and freed in "
    "backward, and the pieces have what is left. It returns 0 and clips nothing.",
    read="harness/engine/gradients.py, `take` and `clip_grad_norm_`",
    caught_by=("clipping_takes_the_norm_of_the_whole_model",),
    training={"optimizer": "SGD", "max_norm": 0.5},
)
class NormOfTheModel(zero2.ZeRO2):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        # As torch's own would, which an engine's parameters refuse: nothing is found, and nothing clipped.
        found = [param.grad for param in self.model.parameters() if param.grad is not None]
        return torch.nn.utils.get_total_norm(found, norm_type)


@exhibit(
    "The slow learner",
    differs={"losses", "gradients", "optimizer"},
    diagnosis="The last bucket is on its way when backward ends, and nobody receives it before the update. Its "
    "parameters, here the token embedding, never change: each step's gradient arrives too late and is dropped.",
    read="zero2.py, the end of step 3, `ZeRO2._reduce_gradients`",
)
class LastBucketMissed(zero2.ZeRO2):
    def _reduce_gradients(self):
        gradients.require_all(self)  # and no `_receive` before it


@exhibit(
    "Fine-tuning",
    differs={"losses"},
    diagnosis="Only the trained parameters are broadcast at the start. Each rank keeps the frozen parameters that it "
    "was initialised with. Nothing ever makes them equal, so the ranks train different models.",
    read="zero2.py, step 0, `ZeRO2.__init__`: `self.buckets`",
    training={"frozen": "positions"},
)
class FrozenForgotten(zero2.ZeRO2):
    def __init__(self, model, *arguments, **options):
        frozen = [param for param in model.parameters() if not param.requires_grad]
        own = [param.detach().clone() for param in frozen]
        super().__init__(model, *arguments, **options)
        for param, values in zip(frozen, own):
            param.data.copy_(values)  # as if only `self.trained_buckets`, and not all buckets, were broadcast


@exhibit(
    "The loop that everybody writes",
    differs={"losses", "gradients", "optimizer", "sent", "all-gathers"},
    diagnosis="The loop calls optimizer.step() and not engine.step(). The optimizer knows this rank's pieces alone. It "
    "updates this rank's shard, with the gradients that have arrived so far: the last bucket is still on its way. And "
    "nobody gathers the shards, so every rank trains another half of the model, and the ranks drift apart. The loss "
    "falls all the same, which is why the right engine refuses this.",
    read="harness/engine/optimizer.py, `over_pieces`: `before_step`",
)
class SteppedByItself(zero2.ZeRO2):
    def step(self):
        self.optimizer.step()  # `optimizer.step()`, as every loop has it: no step 3 before it, no step 5 after it


@exhibit(
    "Safe is safe",
    differs={"reductions that travel while the rank computes"},
    diagnosis="Each reduce-scatter is waited for right after it was sent. All is right but the order of events: "
    "backward stands still while a bucket travels. With a fast network that is hardly seen, and with a slow one this "
    "is the time that ZeRO-2 means to save. (The right engine has 17 of 20 in flight: behind the last three no matrix "
    "product follows.) The peak is lower because only one bucket is whole at a time: the one before has arrived, and "
    "is freed, when backward goes on.",
    read="zero2.py, step 3, `ZeRO2._send`",
    caught_by=("collectives_travel_while_the_rank_computes",),
)
class ReceivedAtOnce(zero2.ZeRO2):
    def _send(self, bucket):
        super()._send(bucket)
        self._receive()  # what was just sent


# ZeRO-3.


@exhibit(
    "Nobody holds it any more",
    differs={"peak in forward", "peak in backward"},
    diagnosis="Freeing by assigning param.data frees nothing: autograd has saved views of the gathered weights for "
    "backward, and each keeps its whole storage alive. Then backward gathers the weights once more beside them. The "
    'printed ZeRO-3 of "AI in Multiple GPUs" frees like this.',
    read="zero3.py, its head (why freeing means resizing the storage), `ZeRO3._free`",
    caught_by=("zero3_has_only_the_units_in_use_gathered",),
)
class FreedByData(zero3.ZeRO3):
    def _gather(self, unit):
        if not unit.gathered:
            guard.open(unit.params)
            for bucket in unit.buckets:
                bucket.flat = bucket.shard.new_empty(bucket.numel)
                for param, view in zip(bucket.params, bucket.views(bucket.flat)):
                    param.data = view
            super()._gather(unit)

    def _free(self, unit):
        if unit.gathered:
            self._wait(unit)
            for bucket in unit.buckets:
                bucket.flat = bucket.shard.new_empty(1).expand(bucket.numel)
                bucket.flat.untyped_storage().resize_(0)
                for param in bucket.params:  # nobody holds the whole weight any more
                    param.data = param.data.new_zeros(()).expand(param.shape)
            guard.close(unit.params)
            unit.gathered = False


@exhibit(
    "The more overlap the better",
    differs={"peak in forward", "units gathered at once in forward"},
    diagnosis="Forward begins with the all-gathers of all units. They hide well behind the computation, but then all "
    "units are gathered at once, which ZeRO-3 is there to avoid.",
    read="zero3.py, step 1, `ZeRO3.before_forward`: `upcoming`",
    caught_by=("zero3_has_only_the_units_in_use_gathered",),
)
class AllAtOnce(zero3.ZeRO3):
    def before_forward(self, unit, upcoming):
        # The earlier a gather is started, the better it hides.
        super().before_forward(unit, self.units if unit is self.root else upcoming)


@exhibit(
    "Tidy after every layer",
    differs={"sent", "all-gathers"},
    diagnosis="After each unit's forward all units are freed, also the prefetched one, which is gathered again to run.",
    read="zero3.py, step 1, `ZeRO3.after_forward`: which unit is freed",
    caught_by=("collectives_are_those_of_the_stage",),
)
class PrefetchedAndFreed(zero3.ZeRO3):
    def after_forward(self, unit):
        for other in self.units:  # a unit has run: free all that is gathered
            self._free(other)


@exhibit(
    "Why gather it again?",
    differs={"losses", "parameters", "sent", "all-gathers"},
    diagnosis="The root stays gathered from step to step. Its shards are updated, but it is never gathered again: "
    "forward goes on with the weights of the first step.",
    read="zero3.py, after step 4, `ZeRO3.step`: what is still gathered has the old values",
)
class RootKept(zero3.ZeRO3):
    def _free(self, unit):
        if unit is self.root and hasattr(self, "optimizer"):  # every forward needs the root: keep it, once built
            return
        super()._free(unit)


@exhibit(
    "A bargain",
    differs={"sent", "all-gathers", "peak in forward", "peak in backward", "units gathered at once in forward"},
    diagnosis="Units are not freed after forward, whatever reshard_after_forward says: the option is accepted and "
    "ignored. Backward then has nothing to gather, and all units stay gathered in between.",
    read="zero3.py, step 1, `ZeRO3.after_forward`: `self.reshard_after_forward`",
    caught_by=("zero3_has_only_the_units_in_use_gathered",),
)
class KeptAfterForward(zero3.ZeRO3):
    def __init__(self, *arguments, reshard_after_forward=True, **options):
        super().__init__(*arguments, reshard_after_forward=False, **options)  # the option is accepted, and ignored


@exhibit(
    "The more ranks, the slower",
    differs={"losses", "norms"},
    diagnosis="Gradients are divided by N before the reduce-scatter, and once more after it. With SGD, as here, every "
    "update is N times too small as well. AdamW divides a gradient by its own size, so the factor drops out: the "
    "losses look right, and only the norms and clipping are wrong. That is why such a bug lives long.",
    read="zero3.py, step 3, `ZeRO3._send`; zero2.py, `Reduction.finish`, which ZeRO-3 uses: "
    "`precision.mean_of_sum(self.shard, world_size)`",
    caught_by=("a_step_on_integers_is_exact",),
    training={"optimizer": "SGD", "max_norm": 100.0},
)
class DividedTwice(zero3.ZeRO3):
    def _send(self, bucket):
        for param in bucket.params:
            param.grad.div_(self.world_size)  # before the sum; `Reduction.finish` divides after it
        super()._send(bucket)


@exhibit(
    "Resumed from a checkpoint",
    differs={"losses"},
    diagnosis="Every rank loads each parameter from its beginning, as if it owned the first part. The ranks after the "
    "first hold a copy of the wrong part.",
    read="harness/engine/state.py, `load_full_state_dict`: `first`",
    caught_by=("the_state_of_one_engine_is_taken_in_by_another",),
    training={"reload_at": 2},
)
class FirstShardForAll(zero3.ZeRO3):
    @torch.no_grad()
    def load_full_state_dict(self, state):
        for bucket in self.buckets:
            for index, part in bucket.cut(bucket.shard):
                value = state[bucket.names[index]].reshape(-1)
                part.copy_(value[: part.numel()])  # from the parameter's beginning, whatever part it is
        self._shards_changed()


@exhibit(
    "A router's loss",
    differs={"error"},
    diagnosis="Backward is known by hooks on what a unit returns. The loss that a block keeps is no output of it, and "
    "backward comes to that loss first. So the router's weights are read while their unit is freed, and backward stops "
    "at a storage of size 0. With prefetching its gather is on the way, and nobody has waited for it: what is read is "
    "whatever the memory had in it before, and it trains on. Backward asks for the weights that it saved, and a "
    "look at these misses no path.",
    read="harness/engine/unit_hooks.py, `UnitHooks._watch_saving`",
    caught_by=("losses_beside_the_outputs_reach_the_weights",),
    options={"prefetch": 0},
    training={"model": "routed"},
)
class KnownByOutputs(zero3.ZeRO3):
    class Hooks(unit_hooks.UnitHooks):
        def _watch_saving(self):
            pass  # a unit's backward begins when one of its outputs gets a gradient: nobody looks at what it saved

    __init__ = patch.object(zero3, "UnitHooks", Hooks)(zero3.ZeRO3.__init__)


@exhibit(
    "Every rank has saved its part",
    differs={"losses", "checkpoint"},
    diagnosis="Every rank hands its shards to torch.distributed.checkpoint as plain tensors, under the same names on "
    "every rank. torch takes what has one name for one tensor, of which all ranks have a copy. It writes one of the "
    "copies, now rank 0's, now rank 1's, and every rank loads that one. The other ranks' shards are nowhere on disk. A "
    "shard must say which part of which tensor it is. (This run has SGD, which keeps nothing between steps, so that "
    "the weights are all that there is to save.)",
    read="harness/engine/rectangles.py, what a rank says of its part, `Cut.__create_write_items__`",
    caught_by=("a_loaded_run_is_the_uninterrupted_one",),
    training={"optimizer": "SGD", "resume_at": 2},
)
class UnderOneName(zero3.ZeRO3):
    def shards(self):
        return {f"bucket {number}": bucket.shard for number, bucket in enumerate(self.buckets)}

    def save(self, folder):
        dcp.save(self.shards(), checkpoint_id=folder, process_group=self.group)  # each rank its own shards

    def load(self, folder):
        dcp.load(self.shards(), checkpoint_id=folder, process_group=self.group)  # in place
        self._shards_changed()


@exhibit(
    "Only the weights matter",
    differs={"losses", "optimizer after resuming"},
    diagnosis="The weights are loaded, and the optimizer's state is not, although it is in the checkpoint. AdamW "
    "begins at step 1 again, with moments of zero: its first step has the full length of the learning rate in every "
    "element, however small the gradient is. The first loss comes from the weights alone, so a look at it tells "
    "nothing. In a long run the jump is easily taken for a bad batch.",
    read="harness/engine/checkpoint.py, after all was read, `_install`: `engine.optimizer.state`",
    caught_by=("a_loaded_run_is_the_uninterrupted_one",),
    training={"resume_at": 2},
)
class WeightsAlone(zero3.ZeRO3):
    def load(self, folder):
        state = {"model": self.full_state_dict()}  # the checkpoint has "optim" as well
        dcp.load(state, checkpoint_id=checkpoint.newest(folder), process_group=self.group)
        self.load_full_state_dict(state["model"])


exhibit(
    "It was a view",
    differs={"error"},
    diagnosis="Backward is known by hooks on the tensors that a unit returns. A linear layer on three dimensions "
    "returns a view. When somebody writes to a view in place, autograd gives it another history, and drops the hooks "
    "that were on it, without a word. So nobody hears that backward has come to the unit, and its weights are read "
    "while it is freed. Backward asks for the weights that it saved, whatever became of an output.",
    read="harness/engine/unit_hooks.py, `UnitHooks._watch_saving`",
    caught_by=("changed_and_hidden_outputs_reach_the_weights",),
    options={"prefetch": 0},
    training={"model": "in place"},
)(KnownByOutputs)


@exhibit(
    "Infinity on one rank",
    differs={"losses", "scales", "all-reduces"},
    diagnosis="After step 3 each rank has its own shard of the gradients, so an inf lies in one rank's shard. torch's "
    "loss scaler looks at this rank's, and asks nobody. The rank that sees the inf skips its update and halves its "
    "scale; the others update their shards. From then on a rank's loss is multiplied by another number than the "
    "others' before the gradients are summed. All ranks must hear what one has found.",
    read="harness/engine/gradients.py, `GradScaler.unscale_`: `all_reduce`",
    caught_by=("an_overflow_on_one_rank_skips_the_step_on_all",),
    training={"overflow_at": 3, "steps": 6},
)
class DecidedAlone(zero3.ZeRO3):
    class scaler(gradients.GradScaler):  # what the loop makes its scaler of
        def unscale_(self, engine):
            engine._reduce_gradients()
            torch.amp.GradScaler.unscale_(self, engine.optimizer)  # looks at this rank's pieces, and asks nobody
            found = self._found_inf_per_device(engine.optimizer)
            device = engine.trained_buckets[0].flat.device
            found.setdefault(device, torch.zeros((), device=device))  # on a rank that owns only padding


@exhibit(
    "Right on every CPU",
    differs=set(),
    diagnosis="With offload a shard is copied from the host on a stream of its own, beside computation. It is copied "
    "into memory that the computing stream has just given back, and kernels that were issued earlier may still use it. "
    "The copy's stream must wait for them first, and here it does not. Whether anything is overwritten is decided by "
    "who is quicker. A CPU has no streams, and all numbers are right there. On simulated GPUs (tests/simulated_gpu/) "
    "the detector names it in the first forward: `race: what had this memory before on the default stream writes, and "
    "memcpy on stream 4 writes: no event, wait or synchronisation orders the two`.",
    read="harness/engine/placement.py, `Placement.copies_beside`: `self._up.wait_stream`",
    caught_by=("the_host_waits_for_copies",),
    options={"offload_policy": CPUOffloadPolicy()},
)
class CopiedTooEarly(zero3.ZeRO3):
    class Placement(placement.Placement):
        def copies_beside(self):
            return contextlib.nullcontext() if self._device is None else self._device.stream(self._up)  # and no wait

    __init__ = patch.object(interface, "Placement", Placement)(zero3.ZeRO3.__init__)
