"""What momo's query-sparse pass hands on."""

from typing import NamedTuple

import torch


class MeasuredRows(NamedTuple):
    """Output `[B,Hq,R,D]` (`[B,Hq,R,0]` if "joint" measured without values) and log-sum-exp
    `[B,Hq,R]` of the measured rows, and the key blocks `[B,Hq,NQ,k]` (int32, ascending, -1 = none)
    of every query block."""

    out: torch.Tensor
    lse: torch.Tensor
    blocks: torch.Tensor


def joined(rows: list[MeasuredRows], dim: int) -> MeasuredRows:
    """Parts of a call as one; its heads are dimension 1, its queries dimension 2."""
    if len(rows) == 1:
        return rows[0]
    widest = max(part.blocks.shape[-1] for part in rows)
    padded = [part._replace(blocks=_padded(part.blocks, widest)) for part in rows]
    return MeasuredRows(*(torch.cat(tensors, dim) for tensors in zip(*padded, strict=True)))


def _padded(blocks: torch.Tensor, width: int) -> torch.Tensor:
    short = width - blocks.shape[-1]
    return torch.nn.functional.pad(blocks, (0, short), value=-1) if short else blocks
