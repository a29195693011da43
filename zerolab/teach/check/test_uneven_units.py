"""Tests of the task uneven_units: other units for blocks of unequal size."""

from zero3 import ZeRO3
from zerolab.teach.check.helpers import as_chapter, expect_at_most, on_ranks


def measured(stage):
    found, right = as_chapter(stage, ZeRO3)
    most = 0.25 * right.gathered
    expect_at_most("bytes gathered at once", found.gathered, most)
    return found, right


@on_ranks
def test_gathered_at_once(stage):
    """the weights are the chapter's, and at most a quarter of its bytes are gathered at once"""
    measured(stage)


@on_ranks
def test_bytes_sent(stage):
    """bytes sent: the chapter's, and a hundredth for padding"""
    found, right = measured(stage)
    expect_at_most("bytes sent in a step", found.sent, 1.01 * right.sent)


@on_ranks
def test_collectives(stage):
    """collectives: at most twice the chapter's"""
    found, right = measured(stage)
    expect_at_most("collectives in a step", len(found.collectives), 2 * len(right.collectives))
