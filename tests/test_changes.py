"""From chapter to chapter: what should stay the same does, and the docs show what changes."""

from itertools import pairwise
from pathlib import Path

import pytest

from harness.teach import changes

ROOT = Path(__file__).resolve().parent.parent
NOT_THE_LESSON = ["clip_grad_norm_", "full_state_dict", "load_full_state_dict"]


def test_what_the_chapters_share_is_the_same_code():
    """ZeRO-2 changes the way of the gradients alone; ZeRO-3 the way of the parameters, and what depends on it."""
    kinds = changes.sort(changes.read("zero1"), changes.read("zero2"))
    assert kinds["the same"] == ["__call__", "training_step", "step", "_sync_params", *NOT_THE_LESSON]
    assert kinds["changed"] == ["__init__", "_on_gradient", "no_sync", "_sync_gradients", "zero_grad"]
    assert kinds["new"] == ["_end_backward", "_reduce_bucket", "_finish_reduction"] and kinds["gone"] == []

    kinds = changes.sort(changes.read("zero2"), changes.read("zero3"))
    same = ["__call__", "training_step", "no_sync", "_finish_reduction", "_sync_gradients"]
    assert kinds["the same"] == same + NOT_THE_LESSON
    moved = ["step", "_sync_params"]  # step 5 has moved into steps 1 and 2
    assert kinds["changed"] == ["__init__", *moved, "_on_gradient", "_end_backward", "_reduce_bucket", "zero_grad"]
    assert kinds["gone"] == []


@pytest.mark.parametrize("first, second", pairwise(changes.CHAPTERS))
def test_a_chapter_keeps_the_order_of_the_one_before(first, second):
    old, new = (list(changes.read(name).methods) for name in (first, second))
    moved = {"_sync_params"} if second == "zero3" else set()  # it stands with the methods that gather
    assert [name for name in old if name not in moved] == [name for name in new if name in old and name not in moved]


@pytest.mark.parametrize("first, second", pairwise(changes.CHAPTERS))
def test_what_changed_methods_have_in_common(first, second):
    """Lines that every stage has, word for word, in methods that differ elsewhere."""
    common = {
        "__init__": [
            "self.model, self.group, self.find_unused = model, group, find_unused",
            'with record_function("step 0 partition"), torch.no_grad():',
            "bucket.flatten()",
            "dist.broadcast(bucket.flat, group_src=0, group=group)",
            "bucket.make_pieces()",
            "dist.broadcast(buffer, group_src=0, group=group)",
            "self.optimizer = loop.make_optimizer(optimizer_cls, self.trained, param_groups)",
            "self.zero_grad()",
        ],
        "step": [
            'with record_function("step 3 reduce gradients"):',
            "self._sync_gradients()",
            'with record_function("step 4 update the shard"):',
            "self.optimizer.step()",
        ],
        "_on_gradient": ["bucket.used.add(param)  # since `zero_grad`"],
        "zero_grad": [
            "self.model.zero_grad()",
            "for bucket in self.trained:",
            "bucket.used = set()  # the parameters that got a gradient since",
            "for _, piece in bucket.pieces:",
            "piece.grad = None",
        ],
    }
    for method, expected in common.items():
        for name in (first, second):
            lines = [line.strip() for line in changes.read(name).methods[method].split("\n")]
            assert [line for line in lines if line in expected] == expected, (name, method)


@pytest.mark.parametrize("first, second", changes.STEPS)
def test_the_docs_show_what_the_command_says(capsys, first, second):
    assert changes.main([first, second]) == 0
    shown = (ROOT / "docs" / "changes.md").read_text()
    assert f"```diff\n{capsys.readouterr().out}```" in shown, "./launch.sh docs writes it anew"


def test_code_is_compared_without_words_but_not_without_code():
    one = '    def f(self):\n        """One."""\n        return 1  # one'
    assert changes.code(one) == changes.code("    def f(self):\n        return 1")
    assert changes.code(one) != changes.code("    def f(self):\n        return 2")
    assert changes.code("    @mark\n    def f(self): pass") != changes.code("    def f(self): pass")


@pytest.mark.parametrize("arguments", (["zero2"], ["zero2", "zero4"], ["a", "b", "c"]), ids=str)
def test_wrong_chapters(capsys, arguments):
    assert changes.main(arguments) == 2
    assert f"got {' '.join(arguments)!r}" in capsys.readouterr().err
