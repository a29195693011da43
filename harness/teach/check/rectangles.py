"""What is wrong with rectangles that should be elements `first` to `end` of a tensor, in words and in a picture.

Nothing here knows how to cut a range well: the fewest rectangles are found by trying all that there are.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """The elements of the tensor that are in `box`, in the order of memory. What lies outside of the tensor is none."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    indices = [range(max(0, o), min(o + size, most)) for o, size, most in zip(*box, shape)]
    return [sum(index * stride for index, stride in zip(at, strides)) for at in itertools.product(*indices)]


def is_run(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@cache
def _runs(shape: tuple[int, ...]) -> dict[int, set[int]]:
    """{first: every `end` for which these elements are one rectangle}: all rectangles tried."""
    found = {}
    sides = [[(o, end - o) for o, end in itertools.combinations(range(most + 1), 2)] for most in shape]
    for box in itertools.product(*sides):
        numbers = elements(shape, tuple(zip(*box)) or ((), ()))
        if is_run(numbers):
            found.setdefault(numbers[0], set()).add(numbers[-1] + 1)
    return found


@cache
def fewest(shape: tuple[int, ...], first: int) -> dict[int, int]:
    """{end: how many rectangles elements `first` to `end` take at least}, each being one run of memory."""
    counts = {first: 0}
    for start in range(first, math.prod(shape)):  # by one rectangle more from each place that is reached
        for end in _runs(shape)[start] if start in counts else ():
            counts[end] = min(counts.get(end, math.inf), counts[start] + 1)
    return counts


def problem(shape: tuple[int, ...], first: int, end: int, found) -> tuple[str, str, list[str]] | None:
    """(expected, found, a picture), or None if `found` is right: a list of (offsets, sizes)."""
    n = len(shape)
    wanted = f"a list of pairs (offsets, sizes), each a tuple of {n} numbers"
    if not isinstance(found, list | tuple):
        return wanted, repr(found), []
    for pair in found:
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            return wanted, f"{pair!r} in it", []
        for numbers in pair:
            right = isinstance(numbers, tuple) and len(numbers) == n and all(type(each) is int for each in numbers)
            if not right:
                return wanted, f"{pair!r} in it", []
    picture = draw(shape, first, end, found)
    written = Counter(number for box in found for number in elements(shape, box))
    inside = range(first, end)
    missing = [number for number in inside if not written[number]]
    foreign = sorted(number for number in written if number not in inside)
    twice = sorted(number for number, times in written.items() if times > 1)
    each = f"{spans(inside)}, each in one rectangle" if inside else "no rectangle: the range is empty"
    for box in found:
        if any(size < 1 for size in box[1]):
            return each, f"a rectangle without elements: offsets {box[0]}, sizes {box[1]}", picture
    outside = [box for box in found if any(o < 0 or o + size > most for o, size, most in zip(*box, shape))]
    said = [f"outside of the tensor: offsets {o}, sizes {sizes}" for o, sizes in outside[:1]]
    said += [f"in a rectangle, and not in the range (small letters): {spans(foreign)}"] * bool(foreign)
    said += [f"in no rectangle (`?`): {spans(missing)}"] * bool(missing)
    said += [f"in more than one rectangle (`*`): {spans(twice)}"] * bool(twice)
    if said:
        return each, "; ".join([*said, *_why(shape, first, end, found, missing, foreign)]), picture
    starts = [elements(shape, box)[0] for box in found]
    for box in found:
        if not is_run(elements(shape, box)):
            said = f"one with {spans(elements(shape, box))}: offsets {box[0]}, sizes {box[1]}"
            return "rectangles whose elements follow each other in memory", said, picture
    if starts != sorted(starts):
        return "the rectangles in the order of memory", f"rectangles that begin with elements {starts}", picture
    least = fewest(shape, first)[end]
    if len(found) > least:
        most = max(1, 2 * (n - 1) + 1)
        few = f"{least} rectangle{'s' * (least > 1)}: in {n} dimension{'s' * (n != 1)} no range takes more than {most}"
        return few, f"{len(found)} rectangles: one for each {'row' if n > 1 else 'element'}?", picture
    return None


def _why(shape, first: int, end: int, found: list[Box], missing: list[int], foreign: list[int]) -> list[str]:
    """What a student may have thought, or nothing."""
    as_ends = [(offsets, tuple(b - a for a, b in zip(offsets, ends))) for offsets, ends in found]
    if [number for box in as_ends for number in elements(shape, box)] == [*range(first, end)]:
        return ["they would be right if the second tuple were the ends, but it is the sizes"]
    if foreign == [end] and not missing:
        return ["`end` is the first element behind the range, and not the last one in it"]
    if missing == [end - 1] and end - first > 1 and not foreign:
        return [f"the last element of the range is {end - 1}: `end` is the first one behind it"]
    if foreign and len(found) == 1 and len(shape) > 1 and not missing:
        return ["one rectangle around the range has elements of other ranks as well"]
    for stride in (math.prod(shape[place + 1 :]) for place in range(len(shape) - 1)):
        above, below = -(-first // stride) * stride, end // stride * stride  # where whole rows begin and end
        head, tail = [*range(first, min(end, above))], [*range(max(first, below), end)]
        around = {*range(first // stride * stride, first), *range(end, -(-end // stride) * stride)}
        if tail and missing == tail and not foreign:
            return ["the beginning of the last row is forgotten"]
        if head and missing == head and not foreign:
            return ["the rest of the first row is forgotten"]
        if head and missing == head + tail and not foreign:
            return ["the rest of the first row and the beginning of the last one are forgotten"]
        if foreign and around.issuperset(foreign) and not missing:
            return ["the range begins or ends within a row, and whole rows have elements of other ranks"]
    return []


def spans(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] as "elements 1 to 3, 7"."""
    found = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    said = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in found)
    return f"element{'s' * (len(numbers) > 1)} {said}"


def draw(shape: tuple[int, ...], first: int, end: int, found: list[Box]) -> list[str]:
    """The tensor row by row, its rectangles as letters, and what is wrong."""
    marks = ["?" if first <= number < end else "." for number in range(math.prod(shape))]
    for box, letter in zip(found, itertools.chain(LETTERS, itertools.repeat("Z"))):
        for number in elements(shape, box):
            taken = marks[number] not in "?."
            marks[number] = "*" if taken else letter if first <= number < end else letter.lower()
    width = shape[-1] if shape else 1
    height = shape[-2] if len(shape) > 1 else 1
    lines = []
    for place in range(0, len(marks), width) if width else ():
        if len(shape) > 2 and place // width % height == 0:
            plane, at = place // (width * height), []
            for most in reversed(shape[:-2]):
                plane, index = divmod(plane, most)
                at.insert(0, index)
            lines.append(f"[{', '.join(map(str, at))}]")
        lines.append(" ".join(marks[place : place + width]))
    said = [f"{letter}  offsets {offsets}, sizes {sizes}" for letter, (offsets, sizes) in zip(LETTERS, found)]
    said = said[:7] + [f"and {len(found) - 7} more"] * (len(found) > 7)
    column = max([len(line) for line in lines], default=0) + 4
    pairs = itertools.zip_longest(lines, said, fillvalue="")
    return [f"{left:<{column}}{right}".rstrip() for left, right in pairs]
