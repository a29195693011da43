"""Which unit or bucket a collective is for."""

from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from harness.measure.held import buckets_of, storage_under, tensor_leaves
from harness.measure.traffic import kind_of


class CollectiveNames(TorchDispatchMode):
    """`with CollectiveNames(engine) as names:` around a step of a chapter.

    `names.found` has the unit (ZeRO-3) or bucket (ZeRO-1, ZeRO-2) of every collective in the order of issue, "" where
    none was found. The buffers of a bucket are known by their storages. What a reduce-scatter sends is new: it belongs
    to the bucket that the engine sends meanwhile.
    """

    def __init__(self, engine):
        super().__init__()
        self.found: list[str] = []
        self._engine = engine
        self._sending = ""
        self._name_of = {}  # a bucket, or the storage of one of its buffers -> the name
        for number, bucket in enumerate(buckets_of(engine)):
            name = getattr(bucket, "name", f"bucket {number}")  # ZeRO-3's are units
            self._name_of[bucket] = name
            for tensor in tensor_leaves([bucket.flat, bucket.shard, bucket.gradient]):
                self._name_of[storage_under(tensor)._cdata] = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if kind_of(func) is not None:
            names = [self._name_of.get(storage_under(tensor)._cdata) for tensor in tensor_leaves(args[:2])]
            self.found.append(next(filter(None, names), self._sending))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        plain = getattr(self._engine, "send", None)  # ZeRO-1 sends all buckets at once, each from its own buffer

        def send(bucket):
            self._sending = self._name_of[bucket]
            plain(bucket)
            self._sending = ""

        self._patch = mock.patch.object(self._engine, "send", send, create=True)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self._patch.stop()
        return super().__exit__(*exception)
