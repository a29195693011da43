"""Questions that a notebook asks before it answers them. Answers are kept, and compared with the result of the run.

    quiz.keep("bytes per parameter", built=..., after_step=...)      # the reader writes numbers in place of `...`
    quiz.compare("bytes per parameter", built=4.0, after_step=16.0)  # after the run that measures it
    quiz.score()

In notebook 6 readers vote on twelve claims of the articles.
"""

from zerolab.teach.notebook import ROOT, read, show, table

NEAR = 0.05  # a measured number is correct within this fraction; a count must be exact
_kept: dict[str, dict] = {}  # question -> {part: what the reader has written}
_right: dict[str, list[bool]] = {}  # question -> for each answered part, whether it was correct


def keep(question: str, **answers) -> None:
    """Keep the reader's answers to the parts of a question: numbers or words. `...` is no answer yet."""
    _kept[question] = {part: answer for part, answer in answers.items() if answer is not ...}
    missing = len(answers) - len(_kept[question])
    if missing:
        print(f"{missing} of {len(answers)} without an answer yet: write it in place of `...`, then run this cell")
    else:
        print("kept")


def agrees(answer, found) -> bool:
    """Whether an answer agrees with the result: a measured number approximately, anything else exactly."""
    if isinstance(found, float) and isinstance(answer, int | float):
        return abs(answer - found) <= NEAR * abs(found)
    return str(answer).strip().casefold() == str(found).casefold()


def compare(question: str, **found) -> None:
    """Print the results next to the kept answers. A result without an answer is not shown."""
    kept, rows = _kept.get(question, {}), []
    _right[question] = []
    for part, value in found.items():
        row = [part.replace("_", " "), "-", "?", "answer first"]
        if part in kept:
            _right[question].append(agrees(kept[part], value))
            row[1:] = kept[part], shown(value), "right" if _right[question][-1] else "no"
        rows.append(row)
    table([question, "you", "found", ""], rows)


def shown(value) -> str:
    """A number with four digits, a count with all of them, anything else as it is."""
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def answered(question: str) -> bool:
    """Whether a part of this question has an answer. Notebooks show nothing that gives it away before."""
    return bool(_kept.get(question))


def score() -> None:
    """Print how many of the answers so far were correct."""
    answered = sum(map(len, _right.values()))
    right = sum(map(sum, _right.values()))
    print(f"{right} of {answered} predictions right, in {len(_right)} questions")


# The claims of notebook 6, by name: four that hold, four that depend on a condition, four that do not hold. The
# notebooks have shown the reason for each verdict.
ASKED = (
    "zero3_needs_8_times_less",
    "zero2_saves_bandwidth",
    "printed_zero3_frees",
    "zero_leaves_activations_as_they_are",
    "zero3_needs_no_last_all_gather",
    "large_buckets_spike_memory",
    "reduction_overlaps_with_the_update",
    "zero3_frees_a_layer_after_use",
    "zero3_gathers_a_layer_three_times",
    "zero3_sends_half_more_than_ddp",
    "each_stage_sends_more",
    "zero1_adds_no_communication",
)
VOTES = {"holds": "holds", "depends": "depends", "does not hold": "not"}  # the correct vote, by verdict


def recorded() -> dict[str, dict]:
    """The recorded rows of the claims, by name."""
    return {row["name"]: row for row in read(ROOT / "results" / "articles.json")["claims"]}


def ask() -> None:
    """Print the claims with their numbers."""
    rows = recorded()
    for number, name in enumerate(ASKED, 1):
        show(f"{number:2}. {rows[name]['claim']}")


def reveal(question: str, claims: list[dict]) -> None:
    """Compare the votes that were kept as claim_1, claim_2, ... with the verdicts, and print the reason for each.

    `claims` are rows that were run just now. The others are the recorded ones. A claim without a vote is not shown.
    """
    now = {row["name"]: row for row in claims}
    rows = {**recorded(), **now}
    asked = {f"claim_{number}": rows[name] for number, name in enumerate(ASKED, 1)}
    compare(question, **{claim: VOTES[row["verdict"]] for claim, row in asked.items()})
    for claim in _kept.get(question, ()):
        row = asked[claim]
        where = "run just now" if row["name"] in now else "recorded"
        show(f"{claim.replace('_', ' ')}: {row['claim']}\n    {row['verdict']}. {row['why']}")
        show(f"    found ({where}): {row['found']}")
