"""exact: dense's own tokens, for less than dense's time: a sparse method drafts, dense verifies.

Steps of a sparse method choose m tokens, and one pass with dense attention over the last token and
all of them says what dense would have chosen after each: it reads the cache once for m + 1 tokens.
Drafts up to the first that is wrong are accepted, which dense replaces by its own. So each token is
the argmax, or the seeded sample, of a dense pass over the tokens before it. (Self-speculation with
sparse attention: TriForce, arXiv:2404.11912.)

A round costs m draft steps and one pass, and gives 1 + a tokens where a drafts are accepted. It
pays where a cache weighs about as much as the weights do: steps read both.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape
from attnplug.models.cache import PlugLayer
from attnplug.ops.common.checks import WIDE_HEAD_DIMS
from attnplug.policies._sketch_layer import SPARE, SketchLayer
from attnplug.policies.base import DraftingPhase, Phase
from attnplug.policies.crossover import NEVER, DenseBelow
from attnplug.policies.dense import MAX_DECODE_QUERIES, Dense
from attnplug.policies.gather import Gather
from attnplug.policies.grammar import parse_policy
from attnplug.policies.gvr import Gvr
from attnplug.policies.sketch import Sketch

# Tokens of a row from which on two drafts a round gained with the share accepted that a small model
# accepts (bench/exact-steps-h200.json). Where fewer are, rounds end.
CROSSOVER = {"cuda": 131072, "cpu": NEVER}
# Tokens that a row of a batch pays for itself: eight rows of 65,536 tokens gained with four drafts
# of six accepted, and eight of 32,768 gained nothing (the same file).
ROW_CROSSOVER = {"cuda": 49152, "cpu": NEVER}

# Drafts a round with m="auto", at the most: as many as sketch's ring can take back. A verification
# is fed that many and one in any case, and takes as long for fewer.
AUTO_MOST = SPARE

# What may draft: its cache layer takes tokens back on the device, and nothing else remembers them.
DRAFTS: dict[str, type[Phase]] = {"gather": Gather, "gvr": Gvr, "sketch": Sketch}


@dataclasses.dataclass(frozen=True)
class Exact(DenseBelow, DraftingPhase):
    """Decode: drafts by a sparse method, verified by dense attention in `generate`'s loop.

    draft: the method that drafts, a term of a policy string such as "gather(k=64)"; it must keep
    its cache on the GPU. m: drafts a round, or "auto", which chooses from 1 to 8 for each round by
    how many were accepted before, and by what the cache weighs beside the weights. min_tokens:
    caches with room for fewer tokens are decoded by dense steps. None is the crossover that was
    measured on the kind of device; dense steps then also decode calls of too few new tokens for
    rounds to pay, and the rest of a call once dense has accepted too few drafts for that.

    Rounds are made in the loop that attnplug runs for `generate`, where layers have full attention
    or sliding windows that the prompt fills. Each row of a batch accepts its own number of drafts.
    Elsewhere (beams, loops of your own, continuous batching, a batch or windows whose cache the
    caller sees again) each step is dense, and `report(model)` says why; engines refuse exact. In
    float32 the tokens are dense's. In 16 bits a pass over m + 1 tokens and one over a single token
    may round otherwise, so that two tokens whose logits are equal but for rounding may change
    places.
    """

    draft: str = "gather"
    m: int | str = "auto"
    min_tokens: int | None = None

    name: ClassVar[str] = "exact"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})
    head_dims: ClassVar[tuple[int, ...]] = WIDE_HEAD_DIMS
    takes_pending: ClassVar[bool] = True

    def __post_init__(self) -> None:
        most = MAX_DECODE_QUERIES - 1
        count = type(self.m) is int and 1 <= self.m <= most
        self.check("m", count or self.m == "auto", f"an integer from 1 to {most}, or 'auto'")
        self.check_min_tokens()
        object.__setattr__(self, "drafter", self._drafter())

    def _drafter(self) -> DenseBelow:
        """The method that drafts, which serves caches of any length: this one has decided."""
        self.check("draft", isinstance(self.draft, str), "a method's name, such as 'gather'")
        found: Any = parse_policy(self.draft, DRAFTS).decode
        on_gpu = getattr(found, "kv", "gpu") == "gpu"
        self.check("draft", on_gpu, "a cache on the GPU, kv='gpu'")
        if isinstance(found, Sketch):
            self.check("draft", found.audit == 0, "a sketch without audits")
            self.check("m", self.rounds() <= SPARE, f"1 to {SPARE} where sketch drafts")
        return found if found.min_tokens is not None else dataclasses.replace(found, min_tokens=0)

    drafter: ClassVar[Any]  # of each policy its own; no option

    def rounds(self) -> int:
        return AUTO_MOST if isinstance(self.m, str) else self.m

    @property
    def varies_rounds(self) -> bool:
        return self.m == "auto"

    @property
    def asks_for_rounds(self) -> bool:
        return self.min_tokens is not None

    @property
    def layer_type(self) -> type:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The cache layer that drafts need."""
        return self.drafter.layer_type

    def measured_crossover(self, kind: str) -> int:
        return CROSSOVER[kind]

    def measured_row_crossover(self, kind: str) -> int:
        return ROW_CROSSOVER[kind]

    def refusal(self, shape: LayerShape) -> str | None:
        return super().refusal(shape) or self.drafter.refusal(shape)

    def note(self, shape: LayerShape) -> str:
        most = f"up to {self.rounds()}" if self.varies_rounds else self.m
        rounds = f"{self.drafter.name} drafts {most} tokens a round, dense verifies them"
        return f"{rounds}; {self.dense_caches(shape.device)}"

    def cache_layer(self, max_length: int) -> PlugLayer | None:
        layer = self.drafter.cache_layer(max_length)
        if layer is not None:
            layer.serves = self._drafts
        return layer

    def _drafts(self, rows: int, size: int, device: torch.device) -> bool:
        """Whether drafts are made over such a cache, so that it has their codes or summaries."""
        return self.serves(rows, size, device) and self.drafter.serves(rows, size, device)

    @property
    def keeps_queries(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.drafter.keeps_queries

    def note_queries(self, call: AttentionCall) -> None:
        layer = call.state
        if not (isinstance(layer, PlugLayer) and layer.round_part):
            self.drafter.note_queries(call)
        elif isinstance(layer, SketchLayer):  # steps summarise what is accepted
            layer.keep_queries(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = call.state
        part = layer.round_part if isinstance(layer, PlugLayer) else ""
        if part == "dense":
            call.flush()
        if part in ("dense", "verify"):
            return Dense().attend(call)
        if part == "draft":
            if not self.drafter.takes_pending:
                call.flush()
            return self.drafter.attend(call)
        return self.leave_to_dense(call)

    def why_dense(self, call: AttentionCall) -> str:
        why = super().why_dense_steps(call.state)
        why = why or (call.state.no_rounds if isinstance(call.state, PlugLayer) else "")
        return why or "drafts are made in generate's loop only"
