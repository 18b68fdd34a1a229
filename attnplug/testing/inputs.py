"""Attention inputs for tests: one container, a deterministic maker, a hypothesis strategy, and the
list of odd shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

KINDS = ("normal", "integers", "outliers", "constant")
LAYOUTS = ("contiguous", "heads_last", "buffer", "strided")
ODD_HEAD_DIMS = (16, 48, 80, 128, 256)  # the least, two that kernels pad, and two that they do not


@dataclasses.dataclass(frozen=True, repr=False)
class AttentionInputs:
    """q `[B,Hq,T,D]`, k and v `[B,Hkv,S,D]`, and what says which keys a query sees.

    The T queries are the last T of each row's `lengths` tokens (None: all S). `start` is a row's
    first key (left padding). `key_mask` `[B,S]` is False where a key is never seen.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    lengths: torch.Tensor | None = None
    start: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    note: str = ""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of an op: `scale`, and of the others those that are not None."""
        every = {name: getattr(self, name) for name in ("lengths", "start", "key_mask")}
        return {"scale": self.scale, **{k: v for k, v in every.items() if v is not None}}

    def to(self, device: str | torch.device) -> AttentionInputs:
        """The same inputs on `device`, strides kept."""
        moved = {
            field.name: _move(getattr(self, field.name), device)
            for field in dataclasses.fields(self)
        }
        return AttentionInputs(**moved)

    def __repr__(self) -> str:
        parts = [f"q={tuple(self.q.shape)}", f"k={tuple(self.k.shape)}", str(self.q.dtype)]
        for name in ("lengths", "start"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name}={value.tolist()}")
        if self.key_mask is not None:
            parts.append(f"key_mask with {int((~self.key_mask).sum())} holes")
        return f"AttentionInputs({', '.join(parts)}; {self.note})"


def _move(value: Any, device: str | torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Tensor.to makes an inner slice or a stride of two dense: rebuild it instead.
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


def attention_inputs(
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    head_dims: Sequence[int] = (64, 80, 128),
    kinds: Sequence[str] = KINDS,
    layouts: Sequence[str] = LAYOUTS,
    max_batch: int = 2,
    max_kv_heads: int = 2,
    max_group: int = 4,
    max_queries: int = 40,
    max_keys: int = 96,
    padding: bool = True,
    lengths: bool = True,
    key_mask: bool = True,
    device: str = "cpu",
) -> SearchStrategy[AttentionInputs]:
    """A hypothesis strategy of `AttentionInputs`: shapes, GQA, T = 1, left `padding`, `lengths`
    shorter than the buffer (whose tail is NaN), holes in the `key_mask`, memory layouts, and values
    that are normal, small integers (ties), with outlier channels, or all keys alike."""
    st = _hypothesis_strategies()

    @st.composite
    def inputs(draw: Callable[[Any], Any]) -> AttentionInputs:
        queries = draw(st.one_of(st.just(1), st.integers(1, max_queries)))
        keys = draw(st.integers(queries, max(queries, max_keys)))
        kv_heads = draw(st.integers(1, max_kv_heads))
        return make_inputs(
            batch=draw(st.integers(1, max_batch)),
            heads_q=kv_heads * draw(st.integers(1, max_group)),
            heads_kv=kv_heads,
            queries=queries,
            keys=keys,
            head_dim=draw(st.sampled_from(head_dims)),
            dtype=draw(st.sampled_from(dtypes)),
            kind=draw(st.sampled_from(kinds)),
            layout=draw(st.sampled_from(layouts)),
            padding=padding and draw(st.booleans()),
            lengths=lengths and draw(st.booleans()),
            key_mask=key_mask and draw(st.booleans()),
            seed=draw(st.integers(0, 2**16)),
            device=device,
        )

    return inputs()


def _hypothesis_strategies() -> Any:
    try:
        import hypothesis.strategies
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "attnplug.testing.attention_inputs needs hypothesis: pip install 'attnplug[test]'"
        ) from error
    return hypothesis.strategies


def make_inputs(
    *,
    batch: int = 1,
    heads_q: int = 2,
    heads_kv: int = 1,
    queries: int = 1,
    keys: int = 16,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
    layout: str = "contiguous",
    padding: bool = False,
    lengths: bool = False,
    key_mask: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> AttentionInputs:
    """One `AttentionInputs`, a function of its arguments alone: `padding`, `lengths` and `key_mask`
    say which of the three it has, drawn from `seed`."""
    random = torch.Generator().manual_seed(seed)

    def integers(low: Any, high: Any) -> torch.Tensor:  # in low..high, both included
        spread = torch.rand(batch, generator=random, dtype=torch.float32, device="cpu") * (
            high - low + 1
        )
        return (low + spread.floor()).clamp(low, high).long()

    q = _values(random, kind, (batch, heads_q, queries, head_dim), dtype)
    k = _values(random, kind, (batch, heads_kv, keys, head_dim), dtype)
    v = _values(random, "normal", (batch, heads_kv, keys, head_dim), dtype)
    if kind == "constant":
        k[:] = k[:, :, :1]
    length = torch.full((batch,), keys, dtype=torch.int64, device="cpu")
    if lengths:
        length = integers(queries, keys)
        for row in range(batch):
            k[row, :, length[row] :] = v[row, :, length[row] :] = torch.nan
    start = torch.stack([integers(0, int(n) - 1)[0] for n in length]) if padding else None
    mask = None
    if key_mask:
        mask = torch.rand(batch, keys, generator=random, dtype=torch.float32, device="cpu") < 0.8
        mask[torch.arange(batch, device="cpu"), length - 1] = True
    lay = functools.partial(lay_out, layout=layout)
    made = AttentionInputs(
        lay(q),
        lay(k),
        lay(v),
        scale=head_dim**-0.5,
        lengths=length if lengths else None,
        start=start,
        key_mask=mask,
        note=f"{kind}, {layout}, seed {seed}",
    )
    return made if device == "cpu" else made.to(device)


def _values(
    random: torch.Generator, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if kind == "integers":
        return torch.randint(-1, 2, shape, generator=random, device="cpu").to(dtype)
    values = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
    if kind == "outliers":
        channels = torch.randint(0, shape[-1], (2,), generator=random, device="cpu")
        values[..., channels] *= 20
    return values.to(dtype)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout."""
    batch, heads, tokens, dim = x.shape
    if layout == "contiguous":
        return x
    if layout == "heads_last":  # what a projection followed by view and transpose leaves
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "buffer":  # a slice of a larger cache
        room = x.new_full((batch + 1, heads, tokens + 3, dim), torch.nan)[1:, :, 2:-1]
    else:
        room = x.new_full((batch, heads, tokens, 2 * dim), torch.nan)[..., ::2]
    return room.copy_(x)


def odd_inputs(
    *, dtype: torch.dtype = torch.float32, sequence: bool = True, device: str = "cpu"
) -> Iterator[AttentionInputs]:
    """The shapes that break kernels, one of each: a single token, T = 1, sizes next to powers of
    two, head dimensions that kernels pad and that they do not, MHA and GQA with odd groups, every
    layout. With `sequence` there are also padding, short lengths over a NaN tail and masks."""
    make = functools.partial(make_inputs, dtype=dtype, device=device)
    yield make(keys=1)
    yield make(keys=65, heads_q=7)
    yield make(queries=17, keys=17, batch=2, heads_q=3, heads_kv=3)
    yield make(queries=31, keys=67, heads_q=6, heads_kv=2, kind="outliers")
    yield make(queries=5, keys=129, kind="constant")
    for seed, head_dim in enumerate(ODD_HEAD_DIMS):
        yield make(queries=9, keys=33, head_dim=head_dim, seed=seed)
    for layout in LAYOUTS[1:]:
        yield make(queries=3, keys=35, batch=2, heads_q=4, heads_kv=2, layout=layout)
    if not sequence:
        return
    some = functools.partial(make, queries=11, keys=70, batch=3, heads_q=4, heads_kv=2)
    yield some(padding=True)
    yield some(lengths=True, seed=1)
    yield some(key_mask=True, seed=2)
    yield make(keys=70, batch=3, padding=True, lengths=True, key_mask=True, seed=5)
