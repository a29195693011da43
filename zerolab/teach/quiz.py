"""Questions that a notebook asks before it answers them. Answers are kept, and compared with the result of the run.

    quiz.keep("bytes per parameter", built=..., after_step=...)      # the reader writes numbers in place of `...`
    quiz.compare("bytes per parameter", built=4.0, after_step=16.0)  # after the run that measures it
    quiz.score()

In notebook 6 readers vote on twelve claims of the articles.
"""

from zerolab.teach.articles.claim import shown
from zerolab.teach.notebook import ROOT, read, say, table

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


def answered(question: str) -> bool:
    """Whether a part of this question has an answer. Notebooks show nothing that gives it away before."""
    return bool(_kept.get(question))


def score() -> None:
    """Print how many of the answers so far were correct."""
    answered = sum(map(len, _right.values()))
    right = sum(map(sum, _right.values()))
    print(f"{right} of {answered} predictions right, in {len(_right)} questions")


# The claims of notebook 6, as the articles' page words them, four of each verdict. The notebooks have shown what
# decides each of them.
ASKED = (
    "on 8 GPUs ZeRO-3 needs 8 times less memory than DDP",
    "ZeRO-2 saves bandwidth as well as memory",
    "the printed ZeRO-3 frees what it has gathered",
    "ZeRO leaves activations as they are",
    "ZeRO-3 needs no all-gather at the end of the step",
    "too-large buckets spike memory",
    "the gradient sync overlaps with the optimizer's step",
    "an all-reduce sends 2 (N-1)/N of the buffer",
    "ZeRO-3 gathers a layer three times and reduces it once in forward, and again in backward",
    "ZeRO-3 sends 50% more than DDP",
    "DDP communicates least, ZeRO-1 and -2 more, and ZeRO-3 most",
    "the optimizer state is the largest part of what training needs",
)


def ask() -> None:
    """Print the claims with their numbers."""
    for number, claim in enumerate(ASKED, 1):
        say(f"{number:2}. {claim}")


def vote_for(verdict: str) -> str:
    """The correct vote for a verdict: "holds", "when" or "not"."""
    return {"holds": "holds", "does not hold": "not"}.get(verdict, "when")


def reveal(question: str, claims: list[dict]) -> None:
    """Compare the votes that were kept as claim_1, claim_2, ... with the verdicts, and print what decides each.

    `claims` are rows that were run just now; what is not among them comes from results/articles.json. A claim without a
    vote is not told.
    """
    rows = {row["claim"]: row for row in [*read(ROOT / "results" / "articles.json"), *claims]}
    asked = {f"claim_{number}": rows[claim] for number, claim in enumerate(ASKED, 1)}
    compare(question, **{name: vote_for(row["verdict"]) for name, row in asked.items()})
    for name in _kept.get(question, ()):
        row = asked[name]
        where = "run just now" if row in claims else "recorded"
        say(f"{name.replace('_', ' ')}: {row['claim']}\n    {row['verdict']}\n    found ({where}): {row['found']}")
