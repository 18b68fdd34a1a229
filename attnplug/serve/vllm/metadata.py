"""A batch's metadata: FlashAttention's, and what attnplug's layers need besides."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from attnplug.serve.paged.layer import Far
from attnplug.serve.paged.rows import Batch, batch_of

if TYPE_CHECKING:  # writing files needs packages that serving does not
    from attnplug.serve.vllm.traces import Traced


@dataclasses.dataclass
class PlugMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata of a batch, and what attnplug's layers need besides.

    `whole` is the metadata of the same batch with a length of 0 for the rows that are far, which
    `far` says; both are None where no layer has a method that decodes, and where a batch has no far
    row: because it has too few rows, or prompts besides, so that the host may look at lengths.
    `whole` is None, too, where that method reads the other rows itself.
    `traced` are the prompts that are recorded. `positions` are those of the batch's tokens in their
    sequences, where a method asks for them.
    """

    batch: Batch = dataclasses.field(default_factory=lambda: batch_of([0], []))
    whole: FlashAttentionMetadata | None = None
    far: Far | None = None
    traced: "tuple[Traced, ...]" = ()
    positions: torch.Tensor | None = None
    parts: dict[Any, FlashAttentionMetadata] = dataclasses.field(default_factory=dict)

    def part(self, first: int, last: int, tokens: slice, longest: int, *, whole: bool = False):
        """The metadata of rows `first` to `last - 1` alone, whose tokens are at `tokens`. Without
        the schedule that FlashAttention made of the batch: it is that of all rows."""
        key = first, last, whole
        if key not in self.parts:
            base = self.whole if whole else self
            assert base is not None  # asked for where a row is far
            known = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
            alone = FlashAttentionMetadata(**{name: getattr(base, name) for name in known})
            self.parts[key] = dataclasses.replace(
                alone,
                num_actual_tokens=tokens.stop - tokens.start,
                max_query_len=longest,
                query_start_loc=base.query_start_loc[first : last + 1] - tokens.start,
                seq_lens=base.seq_lens[first:last],
                block_table=base.block_table[first:last],
                scheduler_metadata=None,
                max_num_splits=0,
            )
        return self.parts[key]
