"""Methods that leave short calls to dense attention, which is faster there."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.cache_utils import StaticLayer

from attnplug.call import AttentionCall, LayerShape, PagedCall, StepReads
from attnplug.models.cache import PlugLayer
from attnplug.ops.common.device import card
from attnplug.ops.common.divide_rows import divide_rows
from attnplug.policies.base import Phase
from attnplug.policies.dense import Dense
from attnplug.policies.paged import PagedPhase
from attnplug.policies.scaled import scaled
from attnplug.policies.tuned import card_name, lookup

# The crossover of a method that no measured length speaks for: no cache has so many slots.
NEVER = (1 << 31) - 1
DENSE = Dense()
OWN_CARD = "H200"  # that the methods' own crossovers were measured on
MEASURE = " (`attnplug tune` measures on this card)"


class RowCrossover(NamedTuple):
    """From where on a method pays for the rows of one decode step.

    A step pays a fixed price for the method, whatever it reads (more kernels), and a row pays for
    its keep set. Tokens are what a row saves and what the step has paid, in the time that dense
    attention takes to read them:

        saved(n) = max(0, n - row)        a row of n tokens, beside others that pay the price
        far(r)   = n_r >= row  and  sum over all rows i of saved(n_i) >= alone - row

    so that a row alone is far from `alone` tokens on, and the total of the tokens decides for
    several. With row = alone each row is decided by its own length.
    """

    row: int
    alone: int

    def far(self, lengths: torch.Tensor) -> torch.Tensor:
        """Which rows the method serves, bool `[R]`, from their lengths, int32 or int64 `[R]`; 0 is
        a row that pads the batch. Decided where `lengths` is, in integers."""
        saved = (lengths - self.row).clamp(min=0).sum()
        return (lengths >= max(1, self.row)) & (saved >= self.alone - self.row)

    def count(self, lengths: Sequence[int]) -> int:
        """How many of these rows are far, for a host that knows the lengths."""
        saved = sum(max(0, length - self.row) for length in lengths)
        if saved < self.alone - self.row:
            return 0
        return sum(length >= max(1, self.row) for length in lengths)

    def divide(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(lengths of the near rows and 0 for the others, those of the far rows likewise, `far`),
        in one launch."""
        near, far = torch.empty_like(lengths), torch.empty_like(lengths)
        chosen = torch.empty_like(lengths, dtype=torch.bool)
        divide_rows(lengths, near, far, chosen, row=self.row, alone=self.alone)
        return near, far, chosen

    def reachable(self, rows: int, room: int) -> bool:
        """Whether a batch of so many rows with room for `room` tokens each can have a far row."""
        # One comparison: compiled code is guarded by it, and by no second limit.
        return rows > 0 and room >= self.least(rows)

    def least(self, rows: int) -> int:
        """The least room that is reachable for so many rows."""
        return self.row + -(-(self.alone - self.row) // rows)


class Here(NamedTuple):
    """The crossovers of a method on this machine, as RowCrossover has them, and their origin."""

    row: int
    alone: int
    origin: str


class DenseBelow(Phase):
    """A method with an option `min_tokens`: calls of fewer tokens run dense; None is the crossover
    that was measured on the kind of device."""

    min_tokens: int | None
    here: Here | None = None  # no option: `on_this_machine` sets it
    least_tokens: ClassVar[int] = 0  # whatever was measured of its speed
    layer_type: ClassVar[type] = PlugLayer  # that its steps need

    @property
    def scales(self) -> bool:
        """Whether a card's memory decides its crossovers, so that they scale with the bandwidth."""
        return False

    def on_this_machine(self, shape: LayerShape) -> "DenseBelow":
        asked = self.min_tokens is not None
        found = None if asked else lookup(shape.device, shape.heads, str(self))
        if found is None:
            return self.on_this_card(shape)
        origin = f", as measured on this machine on {found.date}"
        return self._with(Here(found.row, found.alone, origin))

    def on_this_card(self, shape: LayerShape) -> "DenseBelow":
        """This method with its crossovers scaled to the card of a layer, whatever was measured."""
        if self.min_tokens is not None or not self.scales or no_card(shape.device):
            return self
        alone, row = self.measured_crossover("cuda"), self.measured_row_crossover("cuda")
        alone, row = (self._on_card(tokens, shape) for tokens in (alone, row))
        if alone is None or row is None:
            return self
        return self._with(Here(row, alone, f", scaled from an {OWN_CARD}'s by bandwidth{MEASURE}"))

    def _on_card(self, tokens: int, shape: LayerShape) -> int | None:
        def reads(n: int) -> StepReads:
            found = self.step_reads(n, shape.head_dim)
            assert found is not None  # of a method that scales
            return found

        return scaled(tokens, reads, shape.head_dim, card(shape.device))

    def _with(self, here: Here) -> "DenseBelow":
        row, alone = (max(self.least_tokens, tokens) for tokens in here[:2])
        made = copy.copy(self)
        object.__setattr__(made, "here", Here(row, alone, here.origin))
        return made

    def origin(self, device: torch.device) -> str:
        """Where the crossover comes from, for notes; "" where it is the device's own default."""
        if self.min_tokens is not None:
            return ", as min_tokens asks"
        if self.here is not None:
            return self.here.origin
        if no_card(device) or OWN_CARD in card_name(device):
            return ""
        return f", as measured on an {OWN_CARD}{MEASURE}"

    def crossover(self, device: torch.device) -> int:
        """Tokens below which dense attention runs on such a device."""
        if self.min_tokens is not None:
            return self.min_tokens
        if self.here is not None:
            return self.here.alone
        return self.measured_crossover("cpu" if device.type == "cpu" else "cuda")

    def row_crossover(self, device: torch.device) -> RowCrossover:
        """The same for the rows of a batch. An explicit `min_tokens` decides each row by
        its own length."""
        alone = self.crossover(device)
        if self.min_tokens is not None:
            return RowCrossover(alone, alone)
        if self.here is not None:
            return RowCrossover(min(self.here.row, alone), alone)
        row = self.measured_row_crossover("cpu" if device.type == "cpu" else "cuda")
        return RowCrossover(min(max(self.least_tokens, row), alone), alone)

    def serves(self, rows: int, size: int, device: torch.device) -> bool:
        """Whether steps over so many rows of one cache with `size` slots are this method's; else
        dense reads them whole."""
        return self.row_crossover(device).reachable(rows, size)

    def measured_crossover(self, kind: str) -> int:
        """The crossover on a kind of device, "cpu" or "cuda", with these options; NEVER where the
        method was not measured to pay at any length."""
        raise NotImplementedError(f"{type(self).__name__} has no measured_crossover")

    def measured_row_crossover(self, kind: str) -> int:
        """The tokens from which on a row pays beside others that pay the step's fixed price. Those
        of a row alone where no batch was measured."""
        return self.measured_crossover(kind)

    def leave_to_dense(
        self, call: AttentionCall, why: Callable[[], str] | None = None
    ) -> torch.Tensor:
        """Serve a call by dense attention in this method's place, and say `why` where the host runs
        this code."""
        if not torch.compiler.is_compiling():
            call.served_by = "dense"
            call.why_dense = self.why_dense(call) if why is None else why()
        if self.takes_pending:  # else it is written
            call.flush()
        return DENSE.attend(call)

    def why_dense(self, call: AttentionCall) -> str:
        """Why this method leaves a call to dense."""
        why = self.why_dense_steps(call.state)
        return why or "the cache layer keeps something else, or of another layer's keys"

    def why_dense_steps(self, state: Any) -> str:
        if isinstance(state, StaticLayer) and state.is_initialized:
            assert state.keys is not None
            rows, size, device = len(state.keys), state.max_cache_len, state.keys.device
            rule = self.row_crossover(device)
            if rule.row >= NEVER:
                return "no measured length made it worth while; min_tokens=0 asks for it"
            if not rule.reachable(rows, size):
                least = rule.least(rows)
                each = f" in each of {rows} rows" if rows > 1 else ""
                return f"room for {size:,} tokens{each}, and it serves from {least:,} on"
        if not isinstance(state, self.layer_type):
            kind = "no static one" if state is None else f"a {type(state).__name__}"
            return f"its cache layer is {kind}: make the cache with attnplug.make_cache"
        return ""

    def check_min_tokens(self) -> None:
        """Raise PolicyError unless `min_tokens` is None or a count."""
        tokens = self.min_tokens
        valid = tokens is None or (type(tokens) is int and tokens >= 0)
        self.check("min_tokens", valid, "None or an integer, at least 0")

    def dense_caches(self, device: torch.device) -> str:
        """Which caches a method with a cache layer of its own runs dense in, for its note."""
        rule = self.row_crossover(device)
        if rule.row >= NEVER:
            return (
                "dense in every cache, as no measured length made it worth while; min_tokens asks "
                "for it, such as min_tokens=0"
            )
        batch = f" ({rule.least(8):,} at batch 8)" if rule.row < rule.alone else ""
        where = self.origin(device)
        where += "," if where else ""
        small = f" below {rule.alone:,} tokens{batch}{where} and in those" if rule.alone else ""
        return f"dense in caches{small} that attnplug did not make for it"


class PagedDenseBelow(DenseBelow, PagedPhase):
    """The same over pages, whose rows the device divides by their lengths."""

    def pages_note(self, device: torch.device) -> str:
        rule = self.row_crossover(device)
        return f"rows of fewer than {rule.row:,} tokens by dense" if rule.row else ""

    def attend_pages(self, call: PagedCall) -> torch.Tensor:
        """Far rows by this method, the others by `dense`, decided on the device."""
        rule = self.row_crossover(call.q.device)
        if call.state is None or not rule.reachable(len(call.table), call.room):
            return DENSE.attend_pages(call)
        if rule.alone <= self.kept:
            return self.attend_far(call)
        near_lengths, far_lengths, far = rule.divide(call.lengths)
        # No near row is longer than one that would be far alone.
        table = call.table[:, : -(-rule.alone // call.k.shape[2])]
        near = dataclasses.replace(call, table=table, lengths=near_lengths)
        out = DENSE.attend_pages(near)
        distant = dataclasses.replace(call, lengths=far_lengths)
        self.end_far(self.begin_far(distant), distant, far, out)
        return out


def no_card(device: torch.device) -> bool:
    """Whether a device is no GPU, or torch sees none here."""
    return device.type != "cuda" or not torch.cuda.is_available()
