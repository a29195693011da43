"""Tests of the task micro_batches: one reduction for several backwards."""

from zero2 import ZeRO2
from zerolab.teach.check.helpers import as_chapter, expect_at_most, on_ranks

BACKWARDS = 4


def measured(stage):
    """The chapter, which reduces in every backward, sends 5Ψ. Sending less is the task, so each target demands it."""
    found, right = as_chapter(stage, ZeRO2, BACKWARDS)
    expect_at_most("bytes sent in a step", found.sent, 0.4 * right.sent)
    return found, right


@on_ranks
def test_bytes_sent(stage):
    """the weights are the chapter's, and 2Ψ are sent: at most 0.4 of the chapter's 5Ψ"""
    measured(stage)


@on_ranks
def test_peak(stage):
    """bytes alive: at most 1.6 of the chapter's, so the activations of one micro-batch at a time"""
    found, right = measured(stage)
    expect_at_most("bytes alive at the worst moment of a step", found.peak, 1.6 * right.peak)
