"""The museum of bugs: real mistakes, as a student would write them in the place of a few right lines.

Every exhibit is a class made from a right one, and wrong in one place: from a chapter's class or from a part of it, a
bucket, say; or from an engine, of what only engines do. Many were found in public implementations, two in the articles;
nearly all train without a complaint. `./launch.sh bug` lists them, and `./launch.sh bug 7` runs one beside the right
stage (`visit.py`). tests/test_museum.py demands that each lacks the properties it names.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.profiler import record_function

import zero1
import zero2
import zero3
from harness.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine, base, checkpoint, gradients
from harness.engine.options import placement
from harness.run.engines import CHAPTERS, STAGES

ORACLE = "equals_one_process_on_the_whole_batch"


@dataclass(frozen=True)
class Exhibit:
    """One mistake: what a visitor is told before (title) and after (the rest), and how it is run.

    `code` is what a student would have written, and `wrong` the stage that has it in the place of what is right.
    `differs` is the symptom: the lines of the report that are not those of the right stage; or "error", or "timeout".
    `clue` is what to think of, `caught_by` names the properties that it does not have. `options` go to the stage, and
    `training` to `loop.Training`: the loop in which the mistake shows.
    """

    number: int
    title: str
    code: type
    wrong: type
    differs: set[str]
    clue: str
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
        return next(name for name, chapter in CHAPTERS.items() if issubclass(self.wrong, chapter))

    @property
    def of_engine(self) -> bool:
        """Whether it is of what only engines do, and no chapter."""
        return issubclass(self.wrong, STAGES[self.stage])

    @property
    def right(self) -> type:
        return STAGES[self.stage] if self.of_engine else CHAPTERS[self.stage]


# {a part of a stage: the stage, its method that makes such a part, and the module in which that method finds its class}
MADE_IN = {
    zero3.Unit: (zero3.ZeRO3, "partition", zero3),
    zero2.Reduction: (zero2.ZeRO2, "send", zero2),
    zero1.Bucket: (zero1.ZeRO1, "partition", zero1),
    placement.Placement: (ZeRO3Engine, "prepare", base),
}


def stage_with(code: type) -> type:
    """The stage that has `code` in the place of the right class, where that is a part; else `code`, a stage itself."""
    for part, (stage, method, module) in MADE_IN.items():
        if issubclass(code, part):
            made = patch.object(module, part.__name__, code)(getattr(stage, method))
            return type(code.__name__, (stage,), {method: made})
    return code


EXHIBITS: dict[int, Exhibit] = {}


def exhibit(title: str, **told):
    """Above a wrong class: makes it the museum's next exhibit."""

    def show(code: type) -> type:
        number = len(EXHIBITS) + 1
        EXHIBITS[number] = Exhibit(number, title, code, stage_with(code), **told)
        return code

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
    for piece, part in zip(bucket.pieces, bucket.cut(shard)):
        piece.grad = part


# ZeRO-1.


@exhibit(
    "The learning rate that was tuned on one GPU",
    differs={"losses"},
    clue="By which factor is a step of SGD too long: on two ranks, and on four?",
    diagnosis="The all-reduced gradients are summed and never divided by N, so the learning rate grows with the number "
    "of ranks. AdamW hides it, because it divides a gradient by its own size; SGD and clipping do not. With a "
    "small learning rate the longer steps even look better.",
    read="zero1.py, step 3, `ZeRO1.reduce_gradients`: `bucket.gradient /= bucket.world_size`",
    caught_by=("a_step_on_integers_is_exact",),
    training={"optimizer": "SGD"},
)
class NeverAveraged(zero1.ZeRO1):
    def reduce_gradients(self):
        for bucket in self.buckets:
            dist.all_reduce(bucket.gradient, group=self.group)
            hand_out(bucket, bucket.gradient[bucket.own])  # the sum of N gradients


@exhibit(
    "It ran on the author's model",
    differs={"error"},
    clue="Which lengths can be cut into N equal parts? Try it on three ranks, too.",
    diagnosis="The flat buffer is not padded, so the last rank's shard is shorter than the others. That works only "
    "while the length is a multiple of N (here of 4N elements, as shards start at multiples of 16 bytes). The "
    "WordPress developer's piece cuts every parameter like this. The printed ZeRO-1 of 'AI in Multiple GPUs' pads the "
    "parameter and not its gradient: there, too, N must divide.",
    read="zero1.py, step 0, `Bucket.__init__`: `self.numel` and `self.shard_numel`",
)
class NotPadded(zero1.Bucket):
    def flatten(self):
        self.numel = self.offsets[-1] + self.params[-1].numel()  # not rounded up to a multiple of N
        return super().flatten()


@exhibit(
    "One seed per rank",
    differs={"losses"},
    clue="Rank 1's first loss is wrong already. What must be equal on all ranks before the first step?",
    diagnosis="Nobody broadcasts rank 0's weights at the start. After the first all-gather all ranks agree, on a "
    "patchwork: each shard comes from its owner's own initialisation.",
    read="zero1.py, step 0, `Bucket.flatten`: `dist.broadcast`",
)
class NotBroadcast(zero1.Bucket):
    def flatten(self):
        flat = self.params[0].new_zeros(self.numel)
        for index, param in enumerate(self.params):
            place = self.place(flat, index)
            place.copy_(param)
            param.data = place
        return flat


@exhibit(
    "A third of the traffic saved",
    differs={"losses", "sent"},
    clue="Whose elements does a sum over the ranks add up, if each puts in this part of its gradients?",
    diagnosis="Every rank all-reduces its own shard of the gradients: rank 0's shard 0 is added to rank 1's shard 1. "
    "The sizes match, so nothing complains. A sum of one's own shard over the ranks is a reduce-scatter.",
    read="zero1.py, step 3, `ZeRO1.reduce_gradients`: the whole buffer goes into the all-reduce",
)
class DifferentShards(zero1.ZeRO1):
    def reduce_gradients(self):
        for bucket in self.buckets:
            shard = bucket.gradient[bucket.own]  # rank 0's shard 0, rank 1's shard 1
            dist.all_reduce(shard, group=self.group)
            hand_out(bucket, shard.div_(bucket.world_size))


@exhibit(
    "Five steps, five batches, one model",
    differs={"losses", "optimizer", "peak in forward", "peak in backward"},
    clue="The losses are those of a model that never changes. What must be there when the optimizer steps?",
    diagnosis="The optimizer steps before the gradients are reduced. Its pieces have no gradient yet, so it does "
    "nothing; when they get one, zero_grad() follows.",
    read="zero1.py, steps 3 and 4, `ZeRO1.step`",
)
class UpdatedTooEarly(zero1.ZeRO1):
    def step(self):
        self.optimizer.step()  # step 4
        self.reduce_gradients()  # step 3
        zero1.gather_parameters(self.buckets)  # step 5


@exhibit(
    "Two models for the price of one",
    differs={"losses", "sent", "all-gathers"},
    clue="One kind of collective is missing. Which part of a rank's weights is new after its update?",
    diagnosis="Step 5 is left out. Every rank updates its shard of the weights and never gets the others' shards. Its "
    "own half of the model is new, and the other half never changes.",
    read="zero1.py, step 5, `gather_parameters`",
)
class NotGathered(zero1.ZeRO1):
    def step(self):
        self.reduce_gradients()  # step 3
        self.optimizer.step()  # step 4


@exhibit(
    "Counting from one",
    differs={"losses"},
    clue="All sizes are right, and the order is not. Which part of the buffer does each rank own, counted from 0?",
    diagnosis="Step 5 contributes the shard of rank + 1, which this rank has not updated. The all-gather puts every "
    "shard in another's place, without its update; the next one puts them back where they were.",
    read="zero1.py, step 5, `Bucket.gather`: `self.shard`",
)
class NextRanksShard(zero1.Bucket):
    def gather(self):
        start = (dist.get_rank(self.group) + 1) % self.world_size * self.shard_numel  # ranks counted from 1
        shard = self.flat[start : start + self.shard_numel].clone()
        return zero1.all_gather(self.flat, shard, group=self.group, async_op=True)


@exhibit(
    "Equal to the last digit",
    differs={"optimizer", "peak in forward", "peak in backward"},
    clue="One line is larger than it should be, by the number of ranks. What was the optimizer built over?",
    diagnosis="The optimizer is built over whole parameters on every rank. All ranks compute the same update of "
    "everything, and the all-gather brings what everybody has. It is DDP, with more traffic.",
    read="zero1.py, step 0, `Bucket.make_pieces`; `over_pieces`",
    caught_by=("what_is_shared_out_is_no_more_than_twice_there",),
)
class WholeOptimizer(zero1.Bucket):
    def make_pieces(self):
        self.own = slice(0, self.numel)
        self.cuts = []
        for index, param in enumerate(self.params):  # the optimizer is handed whole parameters, on every rank
            begin = self.offsets[index]
            self.cuts.append((index, begin, begin + param.numel()))
        return [part.detach().requires_grad_() for part in self.cut(self.flat)]


@exhibit(
    "The parameter of one element",
    differs={"timeout"},
    clue="A collective needs all ranks. Which rank may think that it has nothing to do in one?",
    diagnosis="A rank that owns nothing but a bucket's padding skips its all-gather. The others wait for it there, and "
    "it waits for them in the next step's all-reduce. A collective needs all ranks, also those with nothing to give.",
    read="zero1.py, step 5, `gather_parameters`",
    caught_by=("a_rank_may_own_only_padding",),
    options={"bucket_mb": 0},
)
class NothingToGather(zero1.ZeRO1):
    def step(self):
        self.reduce_gradients()
        self.optimizer.step()
        zero1.gather_parameters([bucket for bucket in self.buckets if bucket.pieces])  # where this rank updated some


@exhibit(
    "Two opinions about a norm",
    differs={"losses", "norms", "all-gathers"},
    clue="One collective a step is missing. What must the ranks tell each other before they clip?",
    diagnosis="Every rank clips by the norm of its own shard. The right norm is that of all shards together: the "
    "squares must be summed over the ranks. Otherwise every shard is scaled by another factor.",
    read="harness/engine/gradients.py, `clip_grad_norm_`",
    caught_by=("clipping_takes_the_norm_of_the_whole_model",),
    training={"optimizer": "SGD", "max_norm": 0.5},
)
class OwnNorm(ZeRO1Engine):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        self.reduce_gradients()
        pieces = []
        for bucket in self.buckets:
            pieces += bucket.pieces
        return torch.nn.utils.clip_grad_norm_(pieces, max_norm, norm_type)


@exhibit(
    "Momentum from nowhere",
    differs={"losses"},
    clue="The first update is right, and no other. What would an update be that has the gradients of all steps in it?",
    diagnosis="The gradients' buffer stays from step to step. The hook adds to it, and does not ask whether what is in "
    "it comes from this step. The sum of all steps' gradients is a momentum that nobody asked for.",
    read="zero1.py, step 2, `ZeRO1.on_gradient`: `if index in bucket.missing`",
    training={"optimizer": "SGD"},
)
class OldGradients(zero1.ZeRO1):
    def on_gradient(self, bucket, index, param):
        place = bucket.place(bucket.gradient, index)
        place.add_(bucket.take_gradient(index))  # always, also to what the step before has left there
        bucket.missing.discard(index)


# ZeRO-2.


@exhibit(
    "Half of the batch",
    differs={"losses"},
    clue="Two backwards come before each step. Which of them does the update know of?",
    diagnosis="What arrives from a reduction replaces what an earlier backward of the same step has brought. It should "
    "be added: as it is, only the last micro-batch counts.",
    read="zero2.py, the end of step 3, `Reduction.finish`: `piece.grad += part`",
    caught_by=("backwards_before_a_step_add_up",),
    training={"optimizer": "SGD", "micro_batches": 2},
)
class LastMicroBatch(zero2.Reduction):
    def finish(self):
        self.work.wait()
        self.flat = None
        self.shard /= self.bucket.world_size
        hand_out(self.bucket, self.shard)  # `piece.grad = part`, where an earlier backward may have left one


@exhibit(
    "What the log said",
    differs={
        "peak in backward",
        "reductions sent inside backward",
        "reductions that travel while the rank computes",
    },
    clue="Compare when the reductions are sent, and what is alive before they are.",
    diagnosis="The hook reduces nothing, and step() reduces everything: all gradients, unsharded, are alive when "
    "backward ends. Between steps 1/N of them is held, and that is what the log says. The peak tells the truth.",
    read="zero2.py, step 3 inside step 2, `ZeRO2.send_complete`",
    caught_by=("zero2_has_two_buckets_of_whole_gradients_at_most",),
)
class ReducedAtTheEnd(zero2.ZeRO2):
    def send_complete(self):
        pass  # inside backward nothing is sent

    def reduce_gradients(self):
        for bucket in self.buckets:
            self.send(bucket)
        super().reduce_gradients()


@exhibit(
    "An allocation saved",
    differs={"gradients", "peak in backward"},
    clue="Only 1/N of the gradients has a name. What keeps memory alive: names, or any view of it?",
    diagnosis="The reduced shard is received into its place in the buffer that was sent. It is a view, and a view "
    "keeps the whole storage alive: nothing is freed, although no variable names the buffer any more.",
    read="zero2.py, step 3, `Reduction`: `self.shard`, and `self.flat = None`",
    caught_by=("what_is_shared_out_is_no_more_than_twice_there",),
)
class ReceivedInPlace(zero2.Reduction):
    def __init__(self, bucket):
        self.bucket = bucket
        self.flat = torch.zeros_like(bucket.flat)
        self.fill()
        self.shard = self.flat[bucket.own]  # its place in the buffer that is sent, so why allocate another?
        self.work = zero2.reduce_scatter(self.shard, self.flat, group=bucket.group, async_op=True)


@exhibit(
    "The fast one",
    differs={"losses"},
    clue="Run it twice: the numbers differ from run to run. What tells when a collective is over?",
    diagnosis="Nobody waits for the asynchronous reduce-scatter. The optimizer gets memory that is not written yet: "
    "the losses are wrong in every run in another way, and perhaps NaN.",
    read="zero2.py, step 3, `Reduction.finish`: `self.work.wait()`",
)
class NotWaitedFor(zero2.Reduction):
    def finish(self):
        self.flat = None
        self.shard /= self.bucket.world_size  # what `reduce_scatter` returned is dropped
        hand_out(self.bucket, self.shard)


@exhibit(
    "The calmest gradients in the house",
    differs={"losses", "norms", "all-gathers"},
    clue="The norm is 0. Where are the gradients when backward is over?",
    diagnosis="torch.nn.utils.clip_grad_norm_(model.parameters()) finds no gradient. They were reduced and freed in "
    "backward, and the pieces have what is left. It returns 0 and clips nothing.",
    read="harness/engine/gradients.py, `take` and `clip_grad_norm_`",
    caught_by=("clipping_takes_the_norm_of_the_whole_model",),
    training={"optimizer": "SGD", "max_norm": 0.5},
)
class NormOfTheModel(ZeRO2Engine):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        # As torch's own would, which an engine's parameters refuse: nothing is found, and nothing clipped.
        found = [param.grad for param in self.model.parameters() if param.grad is not None]
        return torch.nn.utils.get_total_norm(found, norm_type)


@exhibit(
    "The slow learner",
    differs={"losses", "gradients", "optimizer"},
    clue="One parameter never changes. Which bucket is sent last, and when does it arrive?",
    diagnosis="The last bucket is on its way when backward ends, and nobody receives it before the update. Its "
    "parameters, here the token embedding, never change: each step's gradient arrives too late and is dropped.",
    read="zero2.py, the end of step 3, `ZeRO2.reduce_gradients`: `self.receive()`",
)
class LastBucketMissed(zero2.ZeRO2):
    def reduce_gradients(self):
        for bucket in self.buckets:  # and no `receive` before it
            bucket.require_gradients()


@exhibit(
    "Fine-tuning",
    differs={"losses"},
    clue="Rank 1's first loss is wrong already, and a parameter is frozen. Who sends it?",
    diagnosis="Only the trained parameters are broadcast at the start. Each rank keeps the frozen parameters that it "
    "was initialised with. Nothing ever makes them equal, so the ranks train different models.",
    read="zero2.py, step 0, `ZeRO2.partition`: `share_the_rest`",
    training={"frozen": "positions"},
)
class FrozenForgotten(zero2.ZeRO2):
    def partition(self, bucket_mb):
        with record_function("step 0 partition"), torch.no_grad():
            return [zero2.Bucket(run, self.group) for run in zero2.by_size(self.model, bucket_mb)]


@exhibit(
    "The loop that everybody writes",
    differs={"losses", "gradients", "optimizer", "sent", "all-gathers"},
    clue="What must happen in front of the optimizer's step, and behind it? Who calls that?",
    diagnosis="The loop calls optimizer.step() and not engine.step(). The optimizer knows this rank's pieces alone. It "
    "updates this rank's shard, with the gradients that have arrived so far: the last bucket is still on its way. And "
    "nobody gathers the shards, so every rank trains another half of the model, and the ranks drift apart. The loss "
    "falls all the same, which is why `ZeRO2Engine` refuses this, and a chapter cannot see it.",
    read="zero2.py, steps 3 to 5, `ZeRO2.step`; harness/engine/optimizer.py, `over_pieces`: `before_step`",
)
class SteppedByItself(zero2.ZeRO2):
    def step(self):
        self.optimizer.step()  # `optimizer.step()`, as every loop has it: no step 3 before it, no step 5 after it


@exhibit(
    "Safe is safe",
    differs={"reductions that travel while the rank computes"},
    clue="All numbers are right but one, and that one is about time. What is waited for, and when?",
    diagnosis="Each reduce-scatter is waited for right after it was sent. All is right but the order of events: "
    "backward stands still while a bucket travels. With a fast network that is hardly seen, and with a slow one this "
    "is the time that ZeRO-2 means to save. (The right engine has 17 of 20 in flight: behind the last three no matrix "
    "product follows.) The peak is lower because only one bucket is whole at a time: the one before has arrived, and "
    "is freed, when backward goes on.",
    read="zero2.py, step 3, `ZeRO2.send`",
    caught_by=("collectives_travel_while_the_rank_computes",),
)
class ReceivedAtOnce(zero2.ZeRO2):
    def send(self, bucket):
        super().send(bucket)
        self.receive()  # what was just sent


# ZeRO-3.


@exhibit(
    "Nobody holds it any more",
    differs={"peak in forward", "peak in backward"},
    clue="All is right but the peaks. What does a linear layer keep for its backward, beside the parameter?",
    diagnosis="Freeing by assigning param.data frees nothing: autograd has saved views of the gathered weights for "
    "backward, and each keeps its whole storage alive. Then backward gathers the weights once more beside them. The "
    'printed ZeRO-3 of "AI in Multiple GPUs" frees like this.',
    read="zero3.py, its head (why freeing means resizing the storage), `Unit.free`",
    caught_by=("zero3_has_only_the_units_in_use_gathered",),
)
class FreedByData(zero3.Unit):
    @functools.cached_property
    def nothing(self):
        return self.shard.new_empty(1).expand(self.numel)  # as many elements, and the memory of one

    def start_gather(self):
        if not self.gathered:
            self.flat = self.shard.new_empty(self.numel)
            for index, param in enumerate(self.params):
                param.data = self.place(self.flat, index)
            self.work = self.gather()
            self.gathered = True

    def free(self):
        if self.gathered:
            self.wait()
            self.flat = self.nothing
            for index, param in enumerate(self.params):
                param.data = self.place(self.flat, index)  # nobody holds the whole weight any more
            self.gathered = False


@exhibit(
    "The more overlap the better",
    differs={"peak in forward", "units gathered at once in forward"},
    clue="How many units are gathered when the first one computes?",
    diagnosis="Forward begins with the all-gathers of all units. They hide well behind the computation, but then all "
    "units are gathered at once, which ZeRO-3 is there to avoid.",
    read="zero3.py, step 1, `ZeRO3.before_forward`: `unit.following`",
    caught_by=("zero3_has_only_the_units_in_use_gathered",),
)
class AllAtOnce(zero3.ZeRO3):
    def __call__(self, *args, **kwargs):
        for unit in self.all_units:  # the earlier a gather is started, the better it hides
            unit.start_gather()
        return super().__call__(*args, **kwargs)


@exhibit(
    "Tidy after every layer",
    differs={"sent", "all-gathers"},
    clue="Count the all-gathers of one unit in forward.",
    diagnosis="After each unit's forward all units are freed, also the prefetched one, which is gathered again to run.",
    read="zero3.py, step 1, `ZeRO3.after_forward`: `unit.free()`",
    caught_by=("collectives_are_those_of_the_stage",),
)
class PrefetchedAndFreed(zero3.ZeRO3):
    def after_forward(self, unit, module, inputs, output):
        for other in self.units:  # a unit has run: free all that is gathered
            other.free()
        super().after_forward(unit, module, inputs, output)


@exhibit(
    "Why gather it again?",
    differs={"losses", "parameters", "sent", "all-gathers"},
    clue="The first loss is right, and no other. How does a new shard get into the weights that forward uses?",
    diagnosis="The root stays gathered from step to step. Its shards are updated, but it is never gathered again: "
    "forward goes on with the weights of the first step.",
    read="zero3.py, after step 4, `ZeRO3.step`: `self.free_all()`",
)
class RootKept(zero3.Unit):
    def free(self):
        if self.name != "root":  # every forward needs the root: keep it
            super().free()


@exhibit(
    "A bargain",
    differs={"sent", "all-gathers", "peak in forward", "peak in backward", "units gathered at once in forward"},
    clue="As if backward gathered nothing. What does forward leave behind?",
    diagnosis="Units are not freed after forward. Backward then has nothing to gather, so a third less is sent, and "
    "all units are gathered in between. As a choice it is `reshard_after_forward=False`, which FSDP2 and `ZeRO3Engine` "
    "have. Whoever wants to train a model that does not fit has no choice.",
    read="zero3.py, step 1, `ZeRO3.after_forward`",
    caught_by=("zero3_has_only_the_units_in_use_gathered",),
)
class KeptAfterForward(zero3.ZeRO3):
    def after_forward(self, unit, module, inputs, output):
        pass  # backward needs the unit again, so why free it?


@exhibit(
    "The more ranks, the slower",
    differs={"losses"},
    clue="By which factor is a step of SGD too short: on two ranks, and on four?",
    diagnosis="Gradients are divided by N before the reduce-scatter, and once more after it. With SGD, as here, every "
    "update is N times too small as well. AdamW divides a gradient by its own size, so the factor drops out: the "
    "losses look right, and only the norms and clipping are wrong. That is why such a bug lives long.",
    read="zero3.py, step 3, `ZeRO3.send`; zero2.py, `Reduction.finish`, which ZeRO-3 uses: "
    "`self.shard /= self.bucket.world_size`",
    caught_by=("a_step_on_integers_is_exact",),
    training={"optimizer": "SGD"},
)
class DividedTwice(zero3.ZeRO3):
    def send(self, unit):
        for param in unit.params:
            param.grad /= unit.world_size  # before the sum; `Reduction.finish` divides after it
        super().send(unit)


@exhibit(
    "Resumed from a checkpoint",
    differs={"losses"},
    clue="All is right until the new engine loads the state. Which part of a parameter does each rank own?",
    diagnosis="Every rank loads each parameter from its beginning, as if it owned the first part. The ranks after the "
    "first hold a copy of the wrong part.",
    read="harness/engine/state.py, `load_full_state_dict`: `first`",
    caught_by=("the_state_of_one_engine_is_taken_in_by_another",),
    training={"reload_at": 2},
)
class FirstShardForAll(ZeRO3Engine):
    @torch.no_grad()
    def load_full_state_dict(self, state):
        for bucket in self.all_buckets:
            for index, part in bucket.numbered(bucket.cut(bucket.shard)):
                value = state[bucket.names[index]].reshape(-1)
                part.copy_(value[: part.numel()])  # from the parameter's beginning, whatever part it is
        self.shards_changed()


@exhibit(
    "A router's loss",
    differs={"error"},
    clue="It stops inside backward, at a weight that is not there. By which ways can backward come to a unit?",
    diagnosis="Backward is known by hooks on what a unit returns. The loss that a block keeps is no output of it, and "
    "backward comes to that loss first. So the router's weights are read while their unit is freed, and backward stops "
    "at a storage of size 0. With prefetching its gather is on the way, and nobody has waited for it: what is read is "
    "whatever the memory had in it before, and it trains on. Backward asks for the weights that it saved, and a "
    "look at these misses no path.",
    read="zero3.py, step 2, `ZeRO3.unpack`: `self.before_backward(unit)`",
    caught_by=("losses_beside_the_outputs_reach_the_weights",),
    options={"prefetch": 0},
    training={"model": "routed"},
)
class KnownByOutputs(zero3.ZeRO3):
    def unpack(self, saved):
        unit, tensor, version = saved
        return tensor  # a unit's backward has begun when the gradient of its output came


@exhibit(
    "Every rank has saved its part",
    differs={"losses", "checkpoint"},
    clue="All is right until the run is resumed. How would a reader of the files tell one rank's shard from another's?",
    diagnosis="Every rank hands its shards to torch.distributed.checkpoint as plain tensors, under the same names on "
    "every rank. torch takes what has one name for one tensor, of which all ranks have a copy. It writes one of the "
    "copies, now rank 0's, now rank 1's, and every rank loads that one. The other ranks' shards are nowhere on disk. A "
    "shard must say which part of which tensor it is. (This run has SGD, which keeps nothing between steps, so that "
    "the weights are all that there is to save.)",
    read="harness/engine/checkpoint/rectangles.py, what a rank says of its part, `Cut.__create_write_items__`",
    caught_by=("a_loaded_run_is_the_uninterrupted_one",),
    training={"optimizer": "SGD", "resume_at": 2},
)
class UnderOneName(ZeRO3Engine):
    def shards(self):
        return {f"bucket {number}": bucket.shard for number, bucket in enumerate(self.all_buckets)}

    def save(self, folder):
        dcp.save(self.shards(), checkpoint_id=folder, process_group=self.group)  # each rank its own shards

    def load(self, folder):
        dcp.load(self.shards(), checkpoint_id=folder, process_group=self.group)  # in place
        self.shards_changed()


@exhibit(
    "Only the weights matter",
    differs={"losses", "optimizer after resuming"},
    clue="The first loss after resuming is right, and the next one is not. What does AdamW need beside the weights?",
    diagnosis="The weights are loaded, and the optimizer's state is not, although it is in the checkpoint. AdamW "
    "begins at step 1 again, with moments of zero: its first step has the full length of the learning rate in every "
    "element, however small the gradient is. The first loss comes from the weights alone, so a look at it tells "
    "nothing. In a long run the jump is easily taken for a bad batch.",
    read="harness/engine/checkpoint/loading.py, after all was read, `_install`: `engine.optimizer.state`",
    caught_by=("a_loaded_run_is_the_uninterrupted_one",),
    training={"resume_at": 2},
)
class WeightsAlone(ZeRO3Engine):
    def load(self, folder):
        state = {"model": self.full_state_dict()}  # the checkpoint has "optim" as well
        dcp.load(state, checkpoint_id=checkpoint.newest(folder), process_group=self.group)
        self.load_full_state_dict(state["model"])


@exhibit(
    "It was a view",
    differs={"error"},
    clue="It stops inside backward. A hook on a tensor belongs to its history: what if the tensor is changed in place?",
    diagnosis="Backward is known by hooks on the tensors that a unit returns. A linear layer on three dimensions "
    "returns a view. When somebody writes to a view in place, autograd gives it another history, and drops the hooks "
    "that were on it, without a word. So nobody hears that backward has come to the unit, and its weights are read "
    "while it is freed. Backward asks for the weights that it saved, whatever became of an output.",
    read="harness/engine/unit_life.py, `UnitLife.unpack`: `self.weight_is_wanted(visit)`",
    caught_by=("changed_and_hidden_outputs_reach_the_weights",),
    options={"prefetch": 0},
    training={"model": "in place"},
)
class HookedOutputsAlone(ZeRO3Engine):
    def weight_is_wanted(self, visit):
        pass  # a unit's backward begins when one of its outputs gets a gradient: nobody looks at what it saved


@exhibit(
    "Infinity on one rank",
    differs={"losses", "scales", "all-reduces"},
    clue="Compare the ranks' loss scales. Who sees the inf, and who must know of it?",
    diagnosis="After step 3 each rank has its own shard of the gradients, so an inf lies in one rank's shard. torch's "
    "loss scaler looks at this rank's, and asks nobody. The rank that sees the inf skips its update and halves its "
    "scale; the others update their shards. From then on a rank's loss is multiplied by another number than the "
    "others' before the gradients are summed. All ranks must hear what one has found.",
    read="harness/engine/gradients.py, `GradScaler.unscale_`: `all_reduce`",
    caught_by=("an_overflow_on_one_rank_skips_the_step_on_all",),
    training={"overflow_at": 3, "steps": 6},
)
class DecidedAlone(ZeRO3Engine):
    class scaler(gradients.GradScaler):  # what the loop makes its scaler of
        def unscale_(self, engine):
            engine.reduce_gradients()
            torch.amp.GradScaler.unscale_(self, engine.optimizer)  # looks at this rank's pieces, and asks nobody
            found = self._found_inf_per_device(engine.optimizer)
            device = engine.buckets[0].flat.device
            found.setdefault(device, torch.zeros((), device=device))  # on a rank that owns only padding


@exhibit(
    "Right on every CPU",
    differs=set(),
    clue="On a CPU all is right. On a GPU, which two streams use the same memory, and which waits for the other?",
    diagnosis="With offload a shard is copied from the host on a stream of its own, beside computation. It is copied "
    "into memory that the computing stream has just given back, and kernels that were issued earlier may still use it. "
    "The copy's stream must wait for them first, and here it does not. Whether anything is overwritten is decided by "
    "who is quicker. A CPU has no streams, and all numbers are right there. On simulated GPUs (extra/simulated_gpu/) "
    "the detector names it in the first forward: `race: what had this memory before on the default stream writes, and "
    "memcpy on stream 4 writes: no event, wait or synchronisation orders the two`.",
    read="harness/engine/options/placement.py, `Placement.copies_beside`: `self._up.wait_stream`",
    caught_by=("the_host_waits_for_copies",),
    options={"offload_policy": CPUOffloadPolicy()},
)
class CopiedTooEarly(placement.Placement):
    def copies_beside(self):
        return contextlib.nullcontext() if self._device is None else self._device.stream(self._up)  # and no wait
