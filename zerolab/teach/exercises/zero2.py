"""The exercise `zero2`: reduce inside backward, and free whole gradients."""

from zerolab.teach.exercises.kinds import Blank, ChapterExercise

LAY_OUT = Blank(
    title="Step 3: lay out a bucket's gradients, and let go of each param.grad",
    where=("Reduction.lay_out_gradients", "take_gradients"),
    hints=(
        "Where must each gradient be so that cutting the buffer into N parts is cutting the parameters? How many "
        "copies of a bucket's gradients are alive while you do it?",
        "self.bucket.lay_out(tensors, dtype) makes the whole buffer; the dtype is self.bucket.flat's. `take_gradients` "
        "returns the gradients, and sets each param.grad to None, so that the copy is their last use.",
    ),
    target="about {lines} lines; no param.grad is left, and there is one copy of the gradients",
    read="Bucket.lay_out in zero1.py; the table in Reduction's docstring",
)
REDUCE = Blank(
    title="Step 3: send a bucket's gradients, and receive this rank's shard of the mean",
    where=("Reduction.start", "Reduction.finish", "Reduction.average", "Reduction.deliver"),
    hints=(
        "Which code still reads the buffer after the call has returned? Which names keep the large buffer alive? What "
        "if the shard has a gradient from an earlier backward already?",
        "`start` keeps the work of reduce_scatter(output, input, group=self.bucket.group, async_op=True) as "
        "self.work: from self.gradient into self.shard_gradient. `finish` waits for it, and calls `average`, which "
        "divides self.shard_gradient by N (self.bucket.world_size), and `deliver`, which makes self.shard_gradient the "
        "gradient of self.bucket.shard, or adds it to the one that is there. Dividing first is also correct.",
    ),
    target="about {lines} lines. It sends Ψ elements. Nothing is left of the whole gradients: 4Ψ/N bytes are held",
    read="the first paragraph at the top of the file; the table in Reduction's docstring",
)
SEND = Blank(
    title="Step 3: at most one bucket in flight",
    where=("ZeRO2.send", "ZeRO2.receive"),
    hints=(
        "Sending is quick and travelling is slow. When must the previous bucket have arrived, so that never more than "
        "two buckets are whole?",
        "`send` receives the previous bucket (self.receive()) first, then makes this one's Reduction "
        "(self.make_reduction(bucket)), keeps it as self.in_flight and starts it. `receive` finishes the one in "
        "flight, if there is one, and sets self.in_flight to None, which frees the whole gradients. The label is "
        'record_function("step 3 reduce gradients").',
    ),
    target="about {lines} lines; two buckets of whole gradients at most: this one, and the one that backward fills",
    read="the drawing of backward at the top of the file",
)
IN_TURN = Blank(
    title="Step 3: inside backward, send the buckets whose turn has come",
    where=("ZeRO2.send_complete",),
    hints=(
        "Two ranks may complete their buckets in different orders. What would the third collective of one rank meet "
        "on the other?",
        "Backward calls this after each gradient. self.turn is the index of the bucket that is sent next, and a "
        "bucket is complete when its `missing` is empty. While the bucket whose turn it is is complete, send it with "
        "self.send and go on to the next. Stop after the last.",
    ),
    target="about {lines} lines; each bucket is sent once, inside backward, in the order of self.buckets on every rank",
    read="the docstring above the blank",
)
ON_GRADIENT = Blank(
    title="Step 2: notice a finished gradient",
    where=("ZeRO2.on_gradient", "ZeRO2.expect_gradients"),
    hints=(
        "How does a stage know that a bucket is complete? And how, that another backward has begun before the step?",
        "`expect_gradients` sets self.turn to 0 and the `missing` of each bucket to the set of its params. "
        "`on_gradient` calls it when all buckets were sent already: then this is the first gradient of another "
        "backward. It checks the gradient, check_gradient(bucket, param), removes the parameter from what is missing "
        "in its bucket (self.bucket_of[param]), and calls self.send_complete().",
    ),
    target="about {lines} lines; correct for several backwards before a step",
    read="the drawing of backward at the top of the file; the docstring of check_gradient",
)
END = Blank(
    title="Step 3: receive the last bucket, and refuse what is incomplete",
    where=("ZeRO2.reduce_gradients",),
    hints=(
        "The last bucket has no backward to hide behind. What if a parameter got no gradient in one bucket?",
        "self.receive(), then check_complete(self.buckets), which raises an error that names the parameters.",
    ),
    target="about {lines} lines; a missing gradient is an error, whichever bucket it is in",
    read="the docstring of check_complete",
)

EXERCISE = ChapterExercise(
    chapter="zero2",
    goal="holds 4Ψ bytes of parameters, 4Ψ/N of gradients and 8Ψ/N of optimizer state, for Ψ parameters in the model. "
    "In backward at most two buckets of whole gradients are alive besides. It sends 2Ψ elements: reduce-scatter, "
    "then all-gather",
    blanks=(LAY_OUT, REDUCE, SEND, IN_TURN, ON_GRADIENT, END),
)
