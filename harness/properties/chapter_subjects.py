"""The chapters' classes as subjects: with whole weights to compare, which a chapter does not give by itself."""

import torch
import torch.distributed as dist

from harness.measure.held import buckets_of
from harness.run import engines


class _WithWholeWeights:
    """What is added to a chapter's class so that a property can see its weights."""

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole weights, gathered from the shards, and this rank's buffers. A collective."""
        whole = {}
        for bucket in buckets_of(self):
            flat = bucket.shard.new_empty(bucket.numel)
            dist.all_gather_single(flat, bucket.shard.contiguous(), group=bucket.group)
            for index, param in enumerate(bucket.params):
                whole[id(param)] = bucket.place(flat, index).clone()
        state = self.model.state_dict(keep_vars=True)
        return {name: whole.get(id(tensor), tensor.detach()) for name, tensor in state.items()}


def subject_class(chapter: type) -> type:
    return type(chapter.__name__, (_WithWholeWeights, chapter), {})


def chapter_of(stage: str) -> str:
    """The name under which the class of a chapter is asked."""
    return f"{stage}.py"


CHAPTERS = {chapter_of(name): subject_class(chapter) for name, chapter in engines.CHAPTERS.items()}
