"""What the rounds of a call came to, and how many drafts the next one makes."""

from dataclasses import dataclass

# The time of a verification in drafts, between 2.1 at 131,072 tokens and 4.0 at 1,048,576 on an
# H200 (bench/exact-steps-h200.json, docs/log/house.md).
VERIFICATION = 3
FIRST = 0.9  # of drafts that dense is taken to accept before it has judged any
KEPT_DRAFTS = 20  # that the acceptance of a call is about: as many before them weigh 1/e as much


@dataclass
class Tally:
    """What the rounds of a call came to."""

    rounds: int = 0
    verified: int = 0  # the same, counted for each row that went on
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        if not self.rounds:
            return ""
        each = self.drafted / self.verified
        row = "" if self.verified == self.rounds else " and row"
        return (
            f"{self.rounds:,} rounds of {each:.2g} drafts, of which dense accepted "
            f"{self.accepted / self.verified:.2f} a round{row}"
        )


@dataclass
class Pace:
    """How many drafts a round makes, `most` at the most, by how many were accepted before. If dense
    accepts a draft with probability p where it has accepted those before it, n drafts give

        (1 + p + p^2 + ... + p^n) / (n + VERIFICATION)

    tokens in the time of a draft. p counts old drafts less; dense's first wrong draft of a round is
    the last that counts."""

    most: int
    accepted: float = FIRST * KEPT_DRAFTS
    judged: float = KEPT_DRAFTS

    def next(self) -> int:
        """The drafts of the next round, at least 1."""
        p, given, best = self.accepted / self.judged, 1.0, (0.0, 0)
        for drafts in range(1, self.most + 1):
            given += p**drafts
            best = max(best, (given / (drafts + VERIFICATION), drafts))
        return best[1]

    def note(self, accepted: int, drafted: int) -> None:
        """A row's round has come out so."""
        judged = min(accepted + 1, drafted)
        kept = (1 - 1 / KEPT_DRAFTS) ** judged
        self.accepted = self.accepted * kept + accepted
        self.judged = self.judged * kept + judged
