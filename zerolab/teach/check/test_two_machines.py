"""Tests of the task two_machines: a gather in two steps, for four ranks on two machines."""

from zero1 import ZeRO1
from zerolab.teach.check.helpers import as_chapter, expect_at_most, on_ranks


def measured(stage):
    found, right = as_chapter(stage, ZeRO1)
    expect_at_most("bytes gathered across machines", found.across, 0.34 * right.across)
    return found, right


@on_ranks
def test_across_machines(stage):
    """the weights are the chapter's, and at most 0.34 of its bytes are gathered across machines"""
    measured(stage)


@on_ranks
def test_bytes_sent(stage):
    """bytes sent in all: not more than the chapter's"""
    found, right = measured(stage)
    expect_at_most("bytes sent in a step", found.sent, right.sent)
