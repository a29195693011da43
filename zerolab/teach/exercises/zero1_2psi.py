"""The exercise `zero1_2psi`: ZeRO-1 with a reduce-scatter, which sends as much as DDP."""

from zerolab.teach.exercises.kinds import Blank, ChapterExercise

REDUCE = Blank(
    title="Step 3: reduce-scatter a bucket, and give the shard its part of the mean",
    where=("ZeRO1.start_reduce", "ZeRO1.finish_reduce"),
    hints=(
        "Of all that the all-reduce brings, what does this rank use? Which collective brings just that, and how large "
        "is its output?",
        "The all-reduce of the chapter brings every rank all averaged gradients, and it uses 1/N of them. A "
        "reduce-scatter brings only this rank's shard: dist.reduce_scatter_single(shard, whole, group=self.group, "
        "async_op=True), with a shard of bucket.shard_numel elements. Before torch 2.13 it is called "
        "dist.reduce_scatter_tensor. `start_reduce` returns the work. The whole must stay alive and unchanged until "
        "somebody has waited for it. `finish_reduce` divides by N (self.world_size) and leaves the mean in "
        "bucket.shard.grad.",
    ),
    target="about {lines} lines. It sends Ψ elements here and 2Ψ in all, and holds at most 4Ψ + 4Ψ/N bytes of "
    "gradients",
    read="the last paragraph of zero2.py; ZeRO paper, section 7",
)


EXERCISE = ChapterExercise(
    chapter="zero1",
    goal="holds what ZeRO-1 holds, and sends 2Ψ elements, like DDP, and not 3Ψ: reduce-scatter, then all-gather. The "
    "other bodies are the chapter's, so solve zero1 first",
    blanks=(REDUCE,),
)
