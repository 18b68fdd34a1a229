"""The scratch cache of `certified_attention`: originals that lately crossed the link, on the GPU.

A slot holds the keys or the values of one block. Blocks and slots fall into `SETS` sets by their
numbers, and a block can only be in a slot of its own set. One program owns all of a set, so that
replacement needs no lock and no host, and is the same for every plan of the kernels.

A block that is not in its set takes the least recently used slot, if that was used neither in this
step nor in the one before. Else the block is read over the link and not kept. Plain LRU would
thrash where a set has more blocks than slots: each would be evicted just before it is needed.
Blocks read for a spot check only are not kept. A slot's seal is a sum over its words, and is
compared whenever it is read.
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.numba_cache import njit
from attnplug.ops.common.triton import tl, triton

SETS = 16  # at least as many as programs list promoted blocks for a KV head (`Plan.chunks`)
# Of `counters`.
COUNTER_STEP = tl.constexpr(0)
COUNTER_WANTED = tl.constexpr(1)
COUNTER_HITS = tl.constexpr(2)
COUNTER_FIELDS = tl.constexpr(3)
NAME = "certified_attention"


class Scratch(NamedTuple):
    """R slots for each row and KV head, a multiple of `SETS`; all contiguous.

    slots: `[B,Hkv,R,block,D]` of the originals' dtype; `[B,Hkv,0,block,D]` on a CPU, which has no
        link: its directory and counters are kept as a GPU's would be.
    owner: int32 `[B,Hkv,R]`, twice the position of the first key of the slot's block, plus one for
        its values; -1: nothing.
    used: int32 `[B,Hkv,R]`, the step that used the slot last.
    seals: int32 `[B,Hkv,R]`.
    counters: int64 `[B,Hkv,SETS,3]`: the step, items that were read exactly (a block's keys, its
        values), and those of them that were in slots.
    """

    slots: torch.Tensor
    owner: torch.Tensor
    used: torch.Tensor
    seals: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        count: int,
        block: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "Scratch":
        """`count` slots, rounded up to a multiple of `SETS`, that hold nothing."""
        rows, count = (batch, heads), -(-count // SETS) * SETS
        stored = count if torch.device(device).type == "cuda" else 0
        made = {"dtype": torch.int32, "device": device}
        return cls(
            torch.zeros((*rows, stored, block, width), dtype=dtype, device=device),
            torch.full((*rows, count), -1, **made),
            torch.full((*rows, count), -2, **made),
            torch.zeros((*rows, count), **made),
            torch.zeros((*rows, SETS, 3), dtype=torch.int64, device=device),
        )

    def forget(self, length: torch.Tensor, block: int) -> None:
        """Drop what is not wholly among the first `length` (`[1]` or `[B]`) tokens."""
        end = (self.owner >> 1) + block
        self.owner.masked_fill_(end > length.reshape(-1, 1, 1), -1)

    def clear(self) -> None:
        """Nothing is held, and nothing was counted."""
        self.owner.fill_(-1)
        self.used.fill_(-2)
        self.counters.zero_()


def check_scratch(k: torch.Tensor, block: int, scratch: tuple[torch.Tensor | None, ...]) -> None:
    """The checks of the five tensors against the keys `[B,Hkv,S,D]`; all None is well."""
    given = [x for x in scratch if x is not None]
    if not given:
        return
    if len(given) != len(Scratch._fields):
        raise ArgumentError(f"{NAME}: scratch has {len(given)} tensors, needs all of it or None")
    slots, owner = given[:2]
    rows, width, count = tuple(k.shape[:2]), k.shape[3], owner.shape[-1]
    stored = 0 if k.device.type == "cpu" and slots.shape[2:3] == (0,) else count
    wanted = (
        ("slots", k.dtype, (*rows, stored, block, width)),
        ("owner", torch.int32, (*rows, count)),
        ("used", torch.int32, (*rows, count)),
        ("seals", torch.int32, (*rows, count)),
        ("counters", torch.int64, (*rows, SETS, 3)),
    )
    for tensor, (label, dtype, shape) in zip(given, wanted, strict=True):
        good = tuple(tensor.shape) == shape and tensor.dtype == dtype
        if not (good and tensor.device == k.device and tensor.is_contiguous()):
            raise ArgumentError(
                f"{NAME}: scratch.{label} is {tensor.dtype} {tuple(tensor.shape)} on "
                f"{tensor.device}, needs contiguous {dtype} {shape} on {k.device}"
            )
    if count == 0 or count % SETS:
        raise ArgumentError(f"{NAME}: scratch has {count} slots, needs a multiple of {SETS}")


# --- CPU: what is kept, without the keeping -----------------------------------------------------


@njit()
def _place(item, of_set, keep, owner, used, now):
    """Whether the item is in a slot; if not, it may get one."""
    best = -1
    for slot in range(of_set, owner.shape[0], SETS):
        if owner[slot] == item:
            used[slot] = now
            return True
        if used[slot] < now - 1 and (best < 0 or used[slot] < used[best]):
            best = slot
    if keep and best >= 0:
        owner[best], used[best] = item, now
    return False


@njit()
def simulate(marks, start, block, owner, used, counters):
    """One step of every (row, KV head). `marks` [B,Hkv,N]: 0 quantized, else 1, plus 2 for values
    too, plus 4 for a spot check and nothing else."""
    batch, heads, blocks = marks.shape
    for b in range(batch):
        for h in range(heads):
            now = np.int32(counters[b, h, 0, 0] + 1)
            counters[b, h, :, 0] = now
            for j in range(blocks):
                mark = marks[b, h, j]
                count = counters[b, h, j % SETS]
                for which in range(2):
                    if mark & (1 + which) > 0:
                        count[1] += 1
                        item = 2 * (start[b] + j * block) + which
                        count[2] += _place(
                            item, j % SETS, mark & 4 == 0, owner[b, h], used[b, h], now
                        )


# --- CUDA: for the kernels that choose and read -------------------------------------------------


@triton.jit
def place_item(item, of_set, keep, numbers, there, owner, used, now, OF: tl.constexpr):
    """(place, owner, used) of one item, of a program's slots `numbers`: the slot that it is in, -2
    less the slot that it gets, or -1."""
    slot = tl.max(tl.where(there & (owner == item), numbers, -1), 0)
    free = there & (numbers % OF == of_set) & (used < now - 1)
    oldest = tl.min(tl.where(free, (used.to(tl.int64) << 20) + numbers, 1 << 62), 0)
    fresh = (slot < 0) & keep & (oldest < 1 << 62)  # pyright: ignore[reportOperatorIssue]
    given = (oldest & 0xFFFFF).to(tl.int32)  # pyright: ignore[reportOperatorIssue]
    at = there & (numbers == tl.where(slot >= 0, slot, tl.where(fresh, given, -1)))  # pyright: ignore[reportOperatorIssue]
    owner = tl.where(at, item, owner)
    used = tl.where(at, now, used)
    return tl.where(slot >= 0, slot, tl.where(fresh, -2 - given, -1)), owner, used  # pyright: ignore[reportOperatorIssue]


@triton.jit
def source(place, slots_at, rows_at, first, step, ROOM: tl.constexpr, D: tl.constexpr):
    """Where the rows of an item are: (pointer, first row, elements from row to row)."""
    there = place >= 0
    at = tl.where(there, slots_at + place.to(tl.int64) * ROOM, rows_at)
    return at, tl.where(there, 0, first), tl.where(there, D, step)


@triton.jit
def words_of(x, ODD: tl.constexpr):
    """The sum of a tile's words, each times an odd number of its own, from ODD on."""
    if x.dtype.primitive_bitwidth == 32:
        word = x.to(tl.int32, bitcast=True)
    else:
        word = x.to(tl.int16, bitcast=True).to(tl.int32)
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    n = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    return tl.sum(tl.sum(word * (2 * (n[:, None] * COLUMNS + c[None, :]) + ODD), 1), 0)
