"""Twelve claims of the articles to vote on before their verdicts are shown (notebook 6)."""

from harness.teach.notebook import ROOT, read, say

VOTES = ("holds", "when", "not")
# As the articles' room words them; two or three of each kind from every corner.
ASKED = (
    "ZeRO-3 on 8 GPUs: 8 times less memory",
    "ZeRO-2 saves bandwidth as well as memory",
    "the printed ZeRO-3 frees what it has gathered",
    "7B under ZeRO-3 fits a 40 GB A100",
    "ZeRO-3 needs no all-gather at the end of the step",
    "fully_shard must go on every layer and then on the model",
    "the gradient sync overlaps with the optimizer's step",
    "an all-reduce sends 2 (N-1)/N of the buffer",
    "fully_shard on the layers, FSDP around the model",
    "ZeRO-3 sends 50% more than DDP",
    "communication: DDP low, ZeRO-1 and -2 medium, ZeRO-3 high",
    "the optimizer state is the largest part",
)


def ask() -> None:
    """Print the claims with their numbers."""
    for number, claim in enumerate(ASKED, 1):
        say(f"{number:2}. {claim}")


def kind(verdict: str) -> str:
    """The vote that a verdict stands for."""
    return {"holds": "holds", "does not hold": "not"}.get(verdict, "when")


def reveal(votes: dict[int, str], claims: list[dict] = ()) -> int:
    """Print verdict and measurement of every claim that has a vote; returns how many votes were right.

    `claims` are rows that were run just now; what is not among them comes from results/articles.json. A claim without a
    vote is not told.
    """
    rows = {row["claim"]: (row, "recorded") for row in read(ROOT / "results" / "articles.json")}
    rows |= {row["claim"]: (row, "run just now") for row in claims}
    voted = {number: vote for number, vote in votes.items() if vote in VOTES}
    right = 0
    for number, vote in voted.items():
        row, where = rows[ASKED[number - 1]]
        right += vote == kind(row["verdict"])
        say(f"{number:2}. {row['claim']}")
        say(f"    you: {vote}, verdict: {row['verdict']} -> {'right' if vote == kind(row['verdict']) else 'no'}")
        say(f"    found ({where}): {row['found']}")
    for number, vote in votes.items():
        if vote and vote not in VOTES:
            say(f"{number:2}. the vote must be one of {', '.join(VOTES)}, it is {vote!r}")
    missing = len(ASKED) - len(voted)
    print(f"\n{right} of {len(voted)} right" + (f"; {missing} without a vote yet" if missing else ""))
    return right
