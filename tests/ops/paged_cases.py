"""Paged caches for the tests of ops that take a table: rows scattered over shuffled pages, NaN
where no key of a row is, and the same rows side by side."""

from dataclasses import dataclass

import torch
from cases import WIDTHS, random
from hypothesis import strategies as st

LAYOUTS = ("heads first", "tokens first", "among other layers")


@dataclass
class Paged:
    """k, v `[2, pages, Hkv, page, D]` under `table` `[B, P]`, and as `rows` `[2, B, Hkv, S, D]`."""

    kv: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor

    @property
    def page(self) -> int:
        return self.kv.shape[3]

    def slots(self) -> torch.Tensor:
        """Where the keys of all rows are, row by row."""
        found = []
        for b, length in enumerate(self.lengths.tolist()):
            n = torch.arange(length, device=self.table.device)
            found.append(self.table[b].long()[n // self.page] * self.page + n % self.page)
        return torch.cat(found)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.kv, self.table, self.lengths

    def to(self, device: str) -> "Paged":
        layout = self.kv.shape, self.kv.stride()
        kv = torch.empty_strided(*layout, dtype=self.kv.dtype, device=device).copy_(self.kv)
        return Paged(kv, self.table.to(device), self.rows, self.lengths.to(device))


def empty_pages(pages, heads, page, width, dtype, layout):
    """NaN pages `[2, pages, Hkv, page, D]`: as vLLM lays them out, as transformers does, and as
    transformers does where other layers' pages lie between."""
    if layout == "heads first":
        return torch.full((2, pages, heads, page, width), torch.nan, dtype=dtype)
    if layout == "tokens first":
        return torch.full((2, pages, page, heads, width), torch.nan, dtype=dtype).transpose(2, 3)
    several = torch.full((pages, 3, 2, page, heads, width), torch.nan, dtype=dtype)
    return several[:, 1].movedim(1, 0).transpose(2, 3)


def make(
    seed, lengths, heads=2, page=16, room=None, width=64, dtype=torch.float32, layout=LAYOUTS[0],
    shared=0,
):  # fmt: skip
    """Rows of these lengths. `room`: pages a row; `shared`: pages at their beginning that all rows
    of enough tokens have in common."""
    batch = len(lengths)
    room = room or max(1, -(-max(lengths) // page))
    pages = batch * room + 3
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int()
    table = order[: batch * room].view(batch, room).clone()
    rows = random(seed + 1, 2, batch, heads, room * page, width)
    spread = random(seed + 2, 1, batch, heads, room * page // 16 + 1, 1).exp()
    rows *= spread.repeat_interleave(16, 3)[:, :, :, : room * page]
    rows = rows.to(dtype)
    for b, length in enumerate(lengths):
        same = min(shared, length // page)
        table[b, :same] = table[0, :same] if lengths[0] // page >= same else table[b, :same]
        if lengths[0] // page >= same:
            rows[:, b, :, : same * page] = rows[:, 0, :, : same * page]
        rows[:, b, :, length:] = torch.nan
    kv = empty_pages(pages, heads, page, width, dtype, layout)
    for b, length in enumerate(lengths):
        for p in range(-(-length // page)):
            kv[:, table[b, p]] = rows[:, b, :, p * page : (p + 1) * page]
        table[b, -(-length // page) :] = -1
    return Paged(kv, table, rows, torch.tensor(lengths))


@st.composite
def paged(draw, pages=(16, 32, 48), least=0, dtypes=(torch.float32,), widths=WIDTHS):
    """Rows whose lengths love the edges of pages, some of them empty, some with shared pages."""
    page, room = draw(st.sampled_from(pages)), draw(st.integers(1, 5))
    edges = st.integers(0, room).map(lambda n: n * page)
    near = st.tuples(edges, st.integers(-1, 1)).map(sum)
    length = st.one_of(st.integers(0, room * page), near)
    wanted = length.map(lambda n: min(max(n, 0), room * page))
    if least:
        wanted = wanted.map(lambda n: n if n == 0 else max(n, least))
    return make(
        draw(st.integers(0, 999)),
        draw(st.lists(wanted, min_size=1, max_size=3)),
        heads=draw(st.integers(1, 2)),
        page=page,
        room=room,
        width=draw(st.sampled_from(widths)),
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(LAYOUTS)),
        shared=draw(st.integers(0, 2)),
    )


def close(found, wanted, factor=1.0):
    """Two paths' (out, lse): sums of float32 in another order."""
    epsilon = torch.finfo(wanted[0].dtype).eps
    largest = 1 + wanted[0].abs().max()
    error = (found[0].double() - wanted[0].double()).abs().max()
    assert error <= factor * (4 * epsilon + 1e-5) * largest
    seen = wanted[1] != -torch.inf
    assert torch.equal(found[1] != -torch.inf, seen)
    assert ((found[1] - wanted[1])[seen].abs() <= 1e-5 + 1e-5 * wanted[1][seen].abs()).all()
