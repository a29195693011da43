"""The exercise `checkpoint`: right solutions of any style pass, and each wrong one hears what is wrong with it."""

import itertools
import math
import types

import pytest
from test_exercises import examine, fails, solution

from harness.engine.rectangles import rectangles as reference
from harness.teach.check import checkpoint
from harness.teach.check import rectangles as judge
from harness.teach.check import steps as check_steps

# A student's words: no recursion; the largest rectangle that begins here, again and again.
LARGEST_FIRST = """\
    found, strides = [], [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    while first < end:
        offsets, rest = [], first
        for stride in strides:
            offsets.append(rest // stride)
            rest %= stride
        sizes = (1,) * len(shape)
        for i, stride in enumerate(strides):  # the outermost dimension along which a whole step fits
            if first % stride == 0 and first + stride <= end:
                count = min(shape[i] - offsets[i], (end - first) // stride)
                sizes = (1,) * i + (count, *shape[i + 1 :])
                break
        found.append((tuple(offsets), sizes))
        first += math.prod(sizes)
    return found
"""
# Another's: the two ends row by row, and whole rows in the middle, by recursion from the inside of a row.
BY_ROWS = """\
    if end <= first:
        return []
    if len(shape) < 2:
        return [((first,), (end - first,))] if shape else [((), ())]
    row = math.prod(shape[1:])

    def part(index, a, b):
        for offsets, sizes in rectangles(shape[1:], a, b):
            yield (index,) + tuple(offsets), (1,) + tuple(sizes)

    (a, head), (b, tail) = divmod(first, row), divmod(end, row)
    if a == b:
        return list(part(a, head, tail))
    found = list(part(a, head, row)) if head else []
    a += head > 0
    if a < b:
        found += [((a,) + (0,) * len(shape[1:]), (b - a, *shape[1:]))]
    return [*found, *part(b, 0, tail)]
"""
IN_TURN = """\
        for offsets, sizes in rectangles(tuple(shape), first, first + part.numel()):
            cut.boxes[offsets] = part[start:][: math.prod(sizes)].reshape(sizes)
            start += math.prod(sizes)
"""
SPLIT = """\
        found = rectangles(shape, first, first + len(part))
        parts = part.split([math.prod(sizes) for _, sizes in found]) if found else ()
        cut.boxes = {offsets: each.view(sizes) for (offsets, sizes), each in zip(found, parts)}
"""
RIGHT = {
    "the reference": {},
    "the largest first": {"rectangles": LARGEST_FIRST, "of": IN_TURN},
    "row by row": {"rectangles": BY_ROWS, "of": SPLIT},
}


@pytest.mark.parametrize("which", RIGHT)
def test_right_solutions_pass(ranks, tmp_path, which):
    report = examine(ranks(3), tmp_path, "checkpoint", solution("checkpoint", **RIGHT[which]))
    assert [verdict["status"] for verdict in report.verdicts] == ["passed"] * 4


# Wrong ones, most of them by a change in `BY_ROWS`. What is said is in the report, the picture's lines as well.
BOUNDING = """\
    if not shape or first >= end:
        return [((), ())] * (first < end)
    row = math.prod(shape[1:])
    top, bottom = first // row, (end - 1) // row + 1
    return [((top, *[0] * (len(shape) - 1)), (bottom - top, *shape[1:]))]
"""
ROWS_ONLY = """\
    if len(shape) < 2 or first >= end:
        return [((first,), (end - first,)) if shape else ((), ())] * (first < end)
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), end // row
    return [((top, *[0] * (len(shape) - 1)), (bottom - top, *shape[1:]))] * (top < bottom)
"""
EACH_ROW = """\
    if len(shape) < 2 or first >= end:
        return [((first,), (end - first,)) if shape else ((), ())] * (first < end)
    row, found = math.prod(shape[1:]), []
    for index in range(first // row, -(-end // row)):
        inside = rectangles(shape[1:], max(0, first - index * row), min(row, end - index * row))
        found += _in_row(index, inside)
    return found
"""
COLUMNS = """\
    if len(shape) != 2 or first >= end or first // shape[1] + 2 != -(-end // shape[1]):
        return BY_ROWS(shape, first, end)
    top, a, b = first // shape[1], first % shape[1], (end - 1) % shape[1] + 1  # two rows: what is in both, and the rest
    if a >= b:
        return BY_ROWS(shape, first, end)
    found = [((top, a), (2, b - a))]
    found += [((top, b), (1, shape[1] - b))] * (b < shape[1]) + [((top + 1, 0), (1, a))] * (a > 0)
    return found
"""


def by_rows(right: str = "", wrong: str = "") -> str:
    assert not right or BY_ROWS.count(right) == 1, right
    return BY_ROWS.replace(right, wrong) if right else BY_ROWS


def inside(body: str) -> str:
    """`body`, in which BY_ROWS(...) is another's right solution."""
    name = "rectangles(shape[1:], a, b)"
    own = BY_ROWS.replace(name, name.replace("rectangles", "BY_ROWS"))
    return "    def BY_ROWS(shape, first, end):\n" + "".join(f"    {line}\n" for line in own.splitlines()) + body


WRONG = {
    "one rectangle around the range": (
        BOUNDING,
        "one rectangle around the range has elements of other ranks as well . . . . . . A offsets (1, 0), sizes (4, 6) "
        "a a A A A A A A A A A A A A A A A A A A A a a a . . . . . .",
    ),
    "whole rows only": (
        ROWS_ONLY,
        "in no rectangle (`?`): elements 8 to 11, 24 to 26; the rest of the first row and the beginning of the last "
        "one are forgotten . . . . . . A offsets (2, 0), sizes (2, 6) . . ? ? ? ? A A A A A A A A A A A A ? ? ? . . .",
    ),
    "whole rows that reach too far": (
        by_rows("return [*found, *part(b, 0, tail)]", "return [*found, *part(b, 0, row)] if tail else found"),
        "whole rows have elements of other ranks",
    ),
    "the last partial row forgotten": (
        by_rows("[*found, *part(b, 0, tail)]", "found"),
        "elements 24 to 26; the beginning of the last row is forgotten",
    ),
    "the first partial row forgotten": (
        by_rows("list(part(a, head, row)) if head else []", "[]"),
        "elements 8 to 11; the rest of the first row is forgotten",
    ),
    "off by one at the end": (
        by_rows("    if end <= first:", "    end -= len(shape) > 1\n    if end <= first:"),
        "`?`): element 26; the last element of the range is 26: `end` is the first one behind it",
    ),
    "the end inclusive": (
        inside("    return BY_ROWS(shape, first, min(end + 1, math.prod(shape))) if end > first else []\n"),
        "(small letters): element 27; `end` is the first element behind the range",
    ),
    "ends in place of sizes": (
        inside("    return [(o, tuple(map(sum, zip(o, s)))) for o, s in BY_ROWS(shape, first, end)]\n"),
        "they would be right if the second tuple were the ends, but it is the sizes",
    ),
    "a row inside a row forgotten": (
        by_rows("rectangles(shape[1:], a, b)", "[((a,) + (0,) * (len(shape) - 2), (b - a, *shape[2:]))] * (a < b)"),
        "rectangles((3, 4, 5), 7, 52)",
    ),
    "not in order": (
        by_rows("[*found, *part(b, 0, tail)]", "[*part(b, 0, tail), *found]"),
        "expected the rectangles in the order of memory found rectangles that begin with elements [24, 8, 12]",
    ),
    "one for each row": (EACH_ROW, "expected 3 rectangles: in 2 dimensions no range takes more than 3 found 4"),
    "the overlap twice": (
        by_rows("part(b, 0, tail)]", "part(b, 0, tail), *part(b, 0, min(1, tail))]"),
        "in more than one rectangle (`*`): element 24 . . . . . .",
    ),
    "across two rows": (inside(COLUMNS), "expected rectangles whose elements follow each other in memory found one"),
    "an empty range as an empty rectangle": (
        inside("    return BY_ROWS(shape, first, end) or [((0,) * len(shape), (0,) * len(shape))]\n"),
        "expected no rectangle: the range is empty found a rectangle without elements",
    ),
    "no dimension forgotten": (
        by_rows("] if shape else [((), ())]", "]"),
        "rectangles((), 0, 1) expected a list of pairs (offsets, sizes), each a tuple of 0 numbers",
    ),
    "lists of lists": (
        inside("    return [[list(o), list(s)] for o, s in BY_ROWS(shape, first, end)]\n"),
        "expected a list of pairs (offsets, sizes), each a tuple of 2 numbers found [[1, 2], [1, 4]] in it",
    ),
    "a tensor without elements divides by zero": (
        by_rows("if end <= first:", "if shape and first // math.prod(shape[1:]) == end or end <= first:"),
        "ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_rectangles_hear_what_is_wrong(ranks, tmp_path, capsys, which):
    body, said = WRONG[which]
    fails(ranks(3), tmp_path, capsys, "checkpoint", solution("checkpoint", rectangles=body), "Step 1", said)


WRONG_ELEMENTS = {
    "the first ones for every rectangle": ("start += math.prod(sizes)", "start = 0", "expected 13"),
    "copied": (".reshape(sizes)", ".reshape(sizes).clone()", "a view of `part` found a copy"),
    "not in the rectangle's shape": (".reshape(sizes)", "", "a tensor of shape (1, 4)"),
    "the range of rank 0": ("first, first + part", "0, part", "keys [(1, 2), (2, 0), (4, 0)]"),
    "one element too few": ("first + part.numel()", "first + part.numel() - 1", "Cut.of(elements"),
}


@pytest.mark.parametrize("which", WRONG_ELEMENTS)
def test_wrong_elements_are_found(ranks, tmp_path, capsys, which):
    right, wrong, said = WRONG_ELEMENTS[which]
    assert IN_TURN.count(right) == 1
    text = solution("checkpoint", of=IN_TURN.replace(right, wrong))
    fails(ranks(3), tmp_path, capsys, "checkpoint", text, "Step 2", said)


def test_a_checkpoint_that_is_not_whole_is_found(ranks, tmp_path, capsys):
    """Wrong solutions that were let through the first two steps do not pass the save and the load either."""
    titles = [each.title for each in check_steps.checks_of("checkpoint")]
    swapped = "        cut.boxes = {key: -box for key, box in cut.boxes.items()} if first else cut.boxes\n"
    for place, of in ((2, IN_TURN + swapped), (3, IN_TURN.replace("part[start:]", "part.flip(0)[start:].flip(0)"))):
        text = solution("checkpoint", of=of)
        fails(ranks(3), tmp_path, capsys, "checkpoint", text, titles[place], "saved by")


def test_the_reference_is_not_to_be_had(ranks, tmp_path, capsys):
    for line, said in (
        ("from harness.engine.rectangles import rectangles as other", "halted"),
        ("from harness.engine import rectangles as module; other = module.rectangles", "halted"),
        (
            "from harness.engine.checkpoint import Cut as C; other = lambda s, a, b: C.of(torch.ones(9), s, a)",
            "it calls",
        ),
    ):
        text = solution("checkpoint", rectangles=f"    {line}\n    return other(shape, first, end)\n")
        fails(ranks(3), tmp_path, capsys, "checkpoint", text, "Step 1", said)
    assert reference((2,), 0, 2) == [((0,), (2,))]  # and all is as before
    import harness.engine

    assert isinstance(harness.engine.rectangles, types.ModuleType)


# The judge itself.


@pytest.mark.parametrize("shape", checkpoint.SHAPES)
def test_the_fewest_are_what_the_reference_gives_and_never_more_than_promised(shape):
    for first, end in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
        least = judge.fewest(shape, first)[end]
        assert len(reference(shape, first, end)) == least <= max(1, 2 * (len(shape) - 1) + 1)


def test_all_kinds_of_tensors_and_ranges_are_tried():
    tried = list(checkpoint.ranges())
    assert {len(shape) for shape, _, _ in tried} >= {0, 1, 2, 3, 4, 5}
    assert {(shape, 0, 0) for shape in checkpoint.SHAPES} <= {*tried}  # empty ranges
    assert any(0 in shape for shape, _, _ in tried) and any(first == end > 0 for _, first, end in tried)
    most = {n: max(len(reference(*each)) for each in tried if len(each[0]) == n) for n in (1, 2, 3, 4)}
    assert most == {n: 2 * (n - 1) + 1 for n in (1, 2, 3, 4)}  # as many as there can be are there


def test_the_picture():
    assert judge.draw((2, 2, 3), 2, 11, [((0, 0, 2), (1, 1, 1)), ((0, 1, 1), (2, 1, 2))]) == [
        "[0]      A  offsets (0, 0, 2), sizes (1, 1, 1)",
        ". . A    B  offsets (0, 1, 1), sizes (2, 1, 2)",
        "? B B",
        "[1]",
        "? ? ?",
        "? B b",
    ]
    assert judge.draw((), 0, 1, []) == ["?"] and judge.draw((0, 2), 0, 0, []) == []
    assert judge.draw((4,), 0, 3, [((0,), (3,)), ((2,), (2,))])[0].startswith("A A * b")
