"""Tests of the task own_prefetch: a prefetch that counts bytes and not units."""

from zero3 import ZeRO3
from zerolab.teach.check.helpers import as_chapter, expect, expect_at_most, on_ranks


def measured(stage):
    found, right = as_chapter(stage, ZeRO3)
    expect(f"three or more buffers gathered at once (the chapter: {right.buffers}), of {found.buffers}",
           found.buffers >= 3, True)  # fmt: skip
    return found, right


@on_ranks
def test_buffers_gathered_at_once(stage):
    """the weights are the chapter's, and three or more buffers are gathered at once (the chapter: two)"""
    measured(stage)


@on_ranks
def test_bytes_gathered_at_once(stage):
    """bytes gathered at once: not more than the chapter's"""
    found, right = measured(stage)
    expect_at_most("bytes gathered at once", found.gathered, right.gathered)


@on_ranks
def test_bytes_sent(stage):
    """bytes sent: not more than the chapter's"""
    found, right = measured(stage)
    expect_at_most("bytes sent in a step", found.sent, right.sent)
