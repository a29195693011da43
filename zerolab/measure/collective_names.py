"""Which unit or bucket a collective is for."""

import contextlib
from unittest import mock

from zerolab.measure.held import buckets_of, storage_under, tensor_leaves
from zerolab.measure.timeline import Span, Timeline


@contextlib.contextmanager
def named_collectives(engine, timeline: Timeline):
    """Around a step of a chapter: spans of collectives get the name of their unit (ZeRO-3) or bucket (ZeRO-1, ZeRO-2).

    The buffers of a bucket are known by their storages. What a reduce-scatter sends is new: it belongs to the bucket
    that the engine sends meanwhile.
    """
    name_of, sending = {}, [""]  # a bucket, or the storage of one of its buffers -> the name
    for index, bucket in enumerate(buckets_of(engine)):
        name_of[bucket] = getattr(bucket, "name", f"bucket {index}")  # ZeRO-3's are units
        for tensor in tensor_leaves([bucket.flat, bucket.shard, bucket.gradient]):
            name_of[storage_under(tensor)._cdata] = name_of[bucket]
    plain = getattr(engine, "send", None)  # ZeRO-1 sends all buckets at once, each from its own buffer

    def send(bucket):
        sending.append(name_of[bucket])
        plain(bucket)
        sending.pop()

    def name(span: Span, args) -> None:
        names = [name_of.get(storage_under(tensor)._cdata) for tensor in tensor_leaves(args[:2])]
        span.unit = next(filter(None, names), sending[-1])

    timeline.on_collective = name
    with mock.patch.object(engine, "send", send, create=True):
        yield
