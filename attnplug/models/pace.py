"""What the rounds of a call came to, how many drafts the next one makes, and whether it pays."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from attnplug.models.cache import PlugLayer

FIRST = 0.9  # of drafts that dense is taken to accept before it has judged any
FIRST_DRAFTS = 16  # that this weighs as much as
KEPT_DRAFTS = 40  # that the acceptance of a call is about: as many before them weigh 1/e as much
# Dense steps in whose time rounds may fall behind dense before they end for good. By fewer, chance
# alone would end rounds that pay in a long answer.
BEHIND = 8
# Bytes that an H200 reads while its host makes a step ready, for each layer of the model: a step
# runs once as it is and is then captured, in 0.1 s for the 28 layers of a model of 7 billion
# weights. Rounds have two such steps where dense has one.
READY = 12 << 30
# A call is decoded in rounds if they should save this many times what their second step takes to be
# made ready. Once would not do, because dense may accept fewer drafts than expected.
TIMES = 2
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"  # in configs
# A batch's verification reads a key mask as well, and moves what the rows have not accepted.
IN_A_BATCH = 1.15


class Costs(NamedTuple):
    """The time of a dense step, that of a verification, and that of making a step ready, in
    drafts."""

    dense: float
    verification: float
    ready: float


def costs_of(model: PreTrainedModel, layers: Iterable[PlugLayer], tokens: int) -> Costs:
    """What steps cost over caches of `tokens` tokens. A draft reads the model's weights, a dense
    step the cache as well, a byte of which took an H200 0.51 to 0.6 of a weight's time, and a
    verification the same for several queries (bench/exact-steps-h200.json)."""
    buffers = [x for layer in layers for x in (layer.keys, layer.values) if x is not None]
    rows = max((len(x) for x in buffers), default=1)
    weights = max(1, _weights_of(model, rows))
    ratio = sum(x[:, :, :tokens].nbytes for x in buffers) / weights
    count = model.config.get_text_config().num_hidden_layers  # sliding windows, too
    return Costs(*steps_in_drafts(ratio, rows), READY * count / weights)


def steps_in_drafts(ratio: float, rows: int) -> tuple[float, float]:
    """The time of a dense step and of a verification, in drafts, over a cache of `ratio` times the
    weights' bytes."""
    return 1 + 0.55 * ratio, (1.05 + 0.6 * ratio) * (IN_A_BATCH if rows > 1 else 1)


def _weights_of(model: PreTrainedModel, rows: int) -> float:
    """Bytes of weights that a step of `rows` tokens reads: of experts, only as many as the tokens
    can go to."""
    config = model.config.get_text_config()
    experts = next((x for name in EXPERTS if (x := getattr(config, name, None))), 0)
    chosen = rows * (getattr(config, "num_experts_per_tok", None) or experts)
    share = min(1.0, chosen / max(1, experts))

    def is_stacked(weight: torch.Tensor) -> bool:
        return weight.dim() == 3 and len(weight) == experts

    return sum(x.nbytes * (share if is_stacked(x) else 1) for x in model.parameters())


@dataclass
class Tally:
    """What the rounds of a call came to."""

    rounds: int = 0
    verified: int = 0  # the same, counted for each row that went on
    drafted: int = 0
    accepted: int = 0
    ended: bool = False  # as too few were accepted: dense steps decoded the rest

    def __str__(self) -> str:
        if not self.rounds:
            return ""
        each = self.drafted / self.verified
        row = "" if self.verified == self.rounds else " and row"
        return (
            f"{self.rounds:,} rounds of {each:.2g} drafts, of which dense accepted "
            f"{self.accepted / self.verified:.2f} a round{row}"
            + ("; that did not pay, so that dense steps decoded the rest" if self.ended else "")
        )


@dataclass
class Pace:
    """How many drafts a round makes by how many were accepted before: `most`, or if `varies` what
    has the most tokens for its time. If dense accepts a draft with probability p where it has
    accepted those before it, n drafts give

        (1 + p + p^2 + ... + p^n) / (n + v)        v: the time of a verification

    tokens in the time of a draft. p counts old drafts less; dense's first wrong draft of a round is
    the last that counts. If it `ends` rounds, they end once they have fallen behind dense: Page's
    cumulative sum of the dense steps in whose time each round ran less the tokens that it gave,
    which is never below 0 (Biometrika 41, 1954)."""

    most: int
    costs: Costs
    varies: bool = True
    ends: bool = True
    accepted: float = FIRST * FIRST_DRAFTS
    judged: float = FIRST_DRAFTS
    behind: float = 0.0  # dense steps

    def _best(self) -> tuple[float, int]:
        """The tokens that the next round gives in the time of a draft, and its drafts."""
        p, given, best = self.accepted / self.judged, 1.0, (0.0, 0)
        for drafts in range(1, self.most + 1):
            given += p**drafts
            if self.varies or drafts == self.most:
                best = max(best, (given / (drafts + self.costs.verification), drafts))
        return best

    def next(self) -> int:
        """The drafts of the next round, at least 1."""
        return self._best()[1]

    def pays(self, left: int) -> bool:
        """Whether rounds have not fallen behind dense, or look like making up for it, or the `left`
        tokens of the call are too few for a dense step to be made ready."""
        if not self.ends or self.behind < BEHIND:
            return True
        return left * (1 / self._best()[0] - self.costs.dense) < self.costs.ready

    def least(self) -> float:
        """How many tokens a call must come to for rounds to make up for their second step `TIMES`
        over, if dense accepts drafts as it is taken to before it has judged any."""
        saved = self.costs.dense - 1 / self._best()[0]
        return TIMES * self.costs.ready / saved if saved > 0 else math.inf

    def note(self, accepted: Sequence[int], drafted: int) -> None:
        """A round has come out so in each row that goes on."""
        for count in accepted:
            judged = min(count + 1, drafted)
            kept = (1 - 1 / KEPT_DRAFTS) ** judged
            self.accepted = self.accepted * kept + count
            self.judged = self.judged * kept + judged
        took = (drafted + self.costs.verification) / self.costs.dense
        given = 1 + sum(accepted) / len(accepted)
        self.behind = max(0.0, self.behind + took - given)
