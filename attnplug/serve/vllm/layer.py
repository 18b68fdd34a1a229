"""One attention layer's work on vLLM's pages, for any of its attention backends: which rows a
method serves, prompts by momo, steps by gather. It knows tensors, and not the engine."""

import dataclasses
from typing import NamedTuple

import torch

from attnplug.call import AttentionCall
from attnplug.ops import gather_decode
from attnplug.ops.common.checks import HEAD_DIMS
from attnplug.policies.momo import LEAST_CHUNK
from attnplug.serve.vllm.layout import Pages, contiguous_row
from attnplug.serve.vllm.options import Phases
from attnplug.serve.vllm.rows import Row
from attnplug.serve.vllm.summaries import PageSummaries, empty_summaries


@dataclasses.dataclass(frozen=True)
class LayerTraits:
    """What decides whether a method can serve a layer."""

    head_dim: int
    longest: int  # tokens that a request can have
    device: torch.device
    left_dense: str = ""  # why the engine's own attention must serve it, "" where it need not


def phases_for(asked: Phases, traits: LayerTraits) -> tuple[Phases, str]:
    """The methods that serve such a layer, and why not those that were asked for."""
    if traits.left_dense:
        return Phases(), traits.left_dense
    if traits.head_dim not in HEAD_DIMS:
        return Phases(), f"head dimension {traits.head_dim} is not one of {HEAD_DIMS}"
    kept, reasons = {}, []
    for slot in ("prefill", "decode"):
        phase = getattr(asked, slot)
        if phase is None:
            continue
        crossover = phase.crossover(traits.device)
        if traits.longest < crossover:
            reasons.append(
                f"{phase.name} serves from {crossover:,} tokens on, --max-model-len is "
                f"{traits.longest:,}"
            )
        else:
            kept[slot] = phase
    return Phases(**kept), "; ".join(reasons)


class Far(NamedTuple):
    """Which rows of a batch gather serves: bool `chosen` `[rows]`, and int32 `lengths` `[rows]`,
    the keys of those rows and 0 for others."""

    lengths: torch.Tensor
    chosen: torch.Tensor

    def first(self, rows: int) -> "Far":
        """The first rows alone."""
        return Far(self.lengths[:rows], self.chosen[:rows])


class ServedLayer:
    """The methods of one layer and what they keep beside its pages."""

    def __init__(
        self,
        phases: Phases,
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        device: torch.device,
    ):
        self.phases, self.scale, self.softcap, self.sinks = phases, scale, softcap, sinks
        self.summaries = None if phases.decode is None else PageSummaries(phases.decode)
        self.prefill_from = self.decode_from = 0
        if phases.prefill is not None:
            self.prefill_from = phases.prefill.crossover(device)
            # The crossover is decided here, by the keys that are seen, and not by a call's queries.
            self._momo = dataclasses.replace(phases.prefill, min_tokens=0)
        if phases.decode is not None:
            self.decode_from = phases.decode.crossover(device)

    def serves_prompt(self, row: Row) -> bool:
        """Whether momo serves a row of several queries: many keys are seen, by queries enough."""
        if self.phases.prefill is None or row.seen < self.prefill_from:
            return False
        return row.queries >= max(2, min(LEAST_CHUNK, self.prefill_from))

    def attend_prompt(
        self,
        row: Row,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: Pages,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """momo for one row, into `out [tokens, Hq, D]`.

        q `[tokens, Hq, D]`, k and v `[tokens, Hkv, D]` are the batch's. A row that begins its
        request is read from them; of a later chunk the keys come from `pages`, through the block
        table `[rows, blocks]`, by one copy.
        """
        tokens = slice(row.first, row.first + row.queries)
        if row.queries == row.seen:
            keys, values = (x[tokens].transpose(0, 1)[None] for x in (k, v))
        else:
            keys, values = (contiguous_row(x, table[row.index], row.seen) for x in pages)
        query = q[tokens].transpose(0, 1)[None]
        out[tokens].copy_(self._momo.attend(self._call(query, keys, values))[0].transpose(0, 1))

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionCall:
        return AttentionCall(q, k, v, self.scale, softcap=self.softcap, sinks=self.sinks)

    def warm_prompts(
        self, chunk: int, longest: int, *, heads: int, kv_heads: int, head_dim: int, **place
    ) -> None:
        """Run momo once for each kind of call: chunks of up to `chunk` queries over up to `longest`
        keys. Triton compiles apart what 16 divides and what it does not."""
        if self.phases.prefill is None or chunk < 2:
            return
        q = torch.zeros(chunk, heads, head_dim, **place).transpose(0, 1)[None]
        k = torch.zeros(1, kv_heads, longest, head_dim, **place)
        for queries in (chunk, chunk - 1):
            for keys in (longest, longest - 1):
                if queries > keys:
                    continue
                rows = q[:, :, :queries], k[:, :, :keys], k[:, :, :keys].clone()
                self._momo.attend(self._call(*rows))
        keys = torch.zeros(chunk, kv_heads, head_dim, **place).transpose(0, 1)[None]
        self._momo.attend(self._call(q, keys, keys))

    def attend_steps(
        self,
        q: torch.Tensor,
        pages: Pages,
        table: torch.Tensor,
        far: Far,
        out: torch.Tensor,
    ) -> None:
        """gather for the `far` ones of rows of one query each, into `out [rows, Hq, D]`, like q.
        Other rows keep what is there. Nothing here looks at a length on the host."""
        phase, summaries = self.phases.decode, self.summaries
        assert phase is not None and summaries is not None  # asked of a layer that decodes
        found = self._gather(q, pages, summaries.of(pages[0]), table, far.lengths)[:, :, 0]
        torch.where(far.chosen[:, None, None], found, out, out=out)

    def _gather(
        self, q: torch.Tensor, pages: Pages, bounds: torch.Tensor, table: torch.Tensor, far
    ) -> torch.Tensor:
        phase = self.phases.decode
        assert phase is not None
        out, _ = gather_decode(
            q.unsqueeze(2),
            *pages,
            None,
            None,
            bounds,
            None,
            far,
            scale=self.scale,
            block=phase.block,
            top_k=phase.k,
            sink=phase.sink,
            local=phase.local,
            scoring=phase.scoring,
            softcap=self.softcap,
            sinks=self.sinks,
            table=table,
        )
        return out

    def warm_steps(
        self,
        rows: int,
        longest: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page: int,
        **place,
    ) -> None:
        """Run gather once for 1, 2, 4 and so on up to `rows` rows of up to `longest` keys, over
        made-up pages of `page` keys."""
        if self.phases.decode is None:
            return
        k = torch.zeros(2, kv_heads, page, head_dim, **place)
        bounds = empty_summaries(k, self.phases.decode)
        count = 1
        while True:
            q = torch.zeros(count, heads, head_dim, **place)
            table = torch.zeros(count, -(-longest // page), dtype=torch.int32, device=k.device)
            lengths = torch.zeros(count, dtype=torch.int32, device=k.device)
            self._gather(q, (k, k), bounds, table, lengths)
            if count >= rows:
                return
            count = min(2 * count, rows)
