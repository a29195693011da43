"""The exercise `zero1`: lay out flat shards, reduce, update, gather."""

from zerolab.teach.exercises.kinds import Blank, ChapterExercise

LAY_OUT = Blank(
    title="Step 0: lay the parameters end to end, pad, and cut into shards",
    where=("Bucket.assign_places",),
    hints=(
        "Which sizes must be multiples of what, and which of them depends on N? What if all parameters are empty?",
        "Set self.offsets: where each parameter of self.params begins. Set self.shard_numel and self.numel: the sizes "
        "of one shard and of the buffer. Every parameter and every shard begins at a multiple of self.alignment(), "
        "and there are self.world_size shards. N rarely divides the sum, so zeros fill the rest. A shard has at least "
        "one element.",
    ),
    target="about {lines} lines; no more padding than needed",
    read="the picture in Bucket's docstring",
)
FLATTEN = Blank(
    title="Step 0: move the parameters into one buffer",
    where=("Bucket.flatten", "Bucket.lay_out", "Bucket.place"),
    hints=(
        "After this, a write to the buffer must change the model. How does a weight become a view?",
        "`place` is a view of the buffer, in the parameter's shape, that begins at the parameter's offset. `lay_out` "
        "makes a new buffer of self.numel elements, zeros, and copies each tensor to its place. `flatten` lays out "
        "the parameters, makes each param.data its place in the buffer, has all ranks start with rank 0's weights "
        "(broadcast_whole([flat], self.group)), and returns the buffer.",
    ),
    target="about {lines} lines; the weights are views of the buffer, and the old memory is free",
    read="the table of tensors in Bucket's docstring",
)
SHARD = Blank(
    title="Step 0: this rank's shard, and a buffer for the gradients",
    where=("Bucket.make_shard", "Bucket.make_gradient"),
    hints=(
        "The optimizer updates the shard, and the model must see it. Backward adds to param.grad, and the bucket must "
        "have it. Which of these need their own memory?",
        "The shard is a part of self.flat, self.own, and shares its memory. "
        "self.gradient is a buffer like self.flat, zeros. self.grads is a list with the place of each "
        "parameter in it: `zero_grad` makes these views the param.grad.",
    ),
    target="about {lines} lines; 4Ψ bytes for the gradients, and not a byte for the shards",
    read="the table of tensors in Bucket's docstring",
)
REDUCE = Blank(
    title="Step 3: all-reduce a bucket, and give the shard its part of the mean",
    where=("ZeRO1.start_reduce", "ZeRO1.finish_reduce"),
    hints=(
        "After the collective every rank has a sum. Which part of it does this rank need, and must it be copied?",
        "`start_reduce` starts to sum bucket.gradient over the ranks in place (dist.all_reduce, group=self.group, "
        "async_op=True) and returns the work. After somebody has waited for it, `finish_reduce` divides all of it by N "
        "(self.world_size), because every param.grad is a view of it and must be the mean, and sets bucket.shard.grad "
        "to this rank's part, bucket.own. Dividing first is also correct.",
    ),
    target="about {lines} lines. It sends 2Ψ elements, times (N-1)/N like every collective, and makes no second copy",
    read="the arithmetic at the top of the file; ZeRO paper, section 5.1",
)
REDUCE_ALL = Blank(
    title="Step 3: reduce all buckets",
    where=("ZeRO1.reduce_gradients",),
    hints=(
        "Why is it better to start all buckets before the first one is waited for? What must happen before anything "
        "is sent?",
        "check_gradients(self.buckets) raises an error for a gradient that is not in its bucket: before the first "
        "collective, else the other ranks wait forever. Start all of self.buckets (self.start_reduce returns the "
        "work), then wait for each work and finish its bucket (self.finish_reduce). If the first bucket's shard has a "
        "gradient already, somebody has called this before, and there is nothing to do.",
    ),
    target="about {lines} lines; all buckets in flight at once",
    read="the docstring above the blank",
)
GATHER = Blank(
    title="Step 5: gather the shards into the weights",
    where=("Bucket.gather", "gather_parameters"),
    hints=(
        "Which rank has the new values of which part, and where must they arrive so that the model sees them without "
        "a copy?",
        "The weights are views of self.flat, so an all-gather into self.flat is all that is needed. This rank sends "
        "self.shard. all_gather(output, input, group=self.group, async_op=True) returns the work: return it. "
        "`gather_parameters` starts all buckets and then waits for each. Autograd does not notice that these weights "
        "have changed, so call increment_version(bucket.params) after each wait.",
    ),
    target="about {lines} lines. It sends Ψ elements in all, and needs no more memory",
    read="Bucket.flatten, which makes the weights views",
)
STEP = Blank(
    title="Step 4: reduce, update this rank's shards, gather",
    where=("ZeRO1.step",),
    hints=(
        "Which of the three needs what another one leaves behind?",
        "self.reduce_gradients(), then the optimizer's step, then gather_parameters(self.buckets). Wrap each in "
        'record_function("step 3 reduce gradients"), "step 4 update the shard", "step 5 gather parameters": that is '
        "how a profile shows the steps. After the last one the gradient of every bucket.shard is None, because it is "
        "used.",
    ),
    target="about {lines} lines; optimizer state 8Ψ/N bytes",
    read="the arithmetic at the top of the file; take_over, which gives the optimizer the shards",
)

EXERCISE = ChapterExercise(
    chapter="zero1",
    goal="holds 4Ψ bytes of parameters, 4Ψ of gradients and 8Ψ/N of optimizer state, for Ψ parameters in the model. "
    "It sends 3Ψ elements: all-reduce, then all-gather",
    blanks=(LAY_OUT, FLATTEN, SHARD, REDUCE, REDUCE_ALL, STEP, GATHER),
)
