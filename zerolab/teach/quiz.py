"""Questions that a notebook asks before a run answers them. The run's result is printed beside the reader's answer.

quiz.keep("bytes per parameter", built=..., after_step=...)      # the reader writes numbers in place of `...`
quiz.compare("bytes per parameter", built=4.0, after_step=16.0)  # after the run that measures it
"""

from zerolab.teach.notebook import table

NEAR = 0.05  # a measured number is correct within this fraction; a count must be exact
_kept: dict[str, dict] = {}  # question -> {part: what the reader has written}


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
    """Print the results next to the kept answers."""
    rows = []
    for part, value in found.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        answer = _kept.get(question, {}).get(part, "-")
        verdict = "" if answer == "-" else "right" if agrees(answer, value) else "no"
        rows.append([part.replace("_", " "), answer, shown, verdict])
    table([question, "you", "found", ""], rows)
