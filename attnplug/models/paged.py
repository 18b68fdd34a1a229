"""transformers' continuous batching: the only place that knows its paged cache and the arguments of
its attention, of which there are four (5.17, 5.18, from 5.19 on, from 5.24 on).

A batch is the tokens of several requests side by side, q `[1,Hq,N,D]`. While all of them decode,
transformers may hand over a block table; nothing is written yet then, and nothing may be read on
the host, because a CUDA graph will replay the step. Otherwise it hands over where each token is to
be written, and where the keys of each request lie. Requests of one token decode from the pages in
place either way, all in one call; a prompt, or a piece of one, is a call of its own.

What a method keeps beside the pages lies in the cache object, by layer.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from attnplug.call import AttentionCall, PagedCall, Served, band_mask, check_output
from attnplug.errors import UnsupportedCallError
from attnplug.models.hf import binding_of, stock_attention
from attnplug.models.names import CACHE, PAGED_NAMES
from attnplug.models.refusals import refuse_options

KEPT = "_attnplug_kept"
# From 5.24 on a module has the paged cache write its keys; before, its attention has.
MODULES_WRITE = CACHE == "cache"


@dataclass(frozen=True)
class LayerPages:
    """One layer's keys and values: pages `[pages,Hkv,page,D]`, and the rows `[rows,Hkv,D]` that
    transformers' indices count, of which `step` lie between two pages of the layer. `group` numbers
    the layers that share indices; padding writes to the row `trash`."""

    k: torch.Tensor
    v: torch.Tensor
    row_k: torch.Tensor
    row_v: torch.Tensor
    step: int
    group: int
    trash: int

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Places in the pages, as methods count them, of rows."""
        return rows // self.step * self.k.shape[2] + rows % self.step

    def write(self, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values `[1,Hkv,N,D]` to `rows` `[N]`."""
        self.row_k.index_copy_(0, rows, key[0].transpose(0, 1))
        self.row_v.index_copy_(0, rows, value[0].transpose(0, 1))


@dataclass
class Batch:
    """What one forward pass asks of the layers of a group: where the new tokens go (`rows`, and
    `slots` of the pages); the requests that decode, by the `table`, `lengths` and place `at` in the
    batch (None: all of it, in order); and the pieces of prompts, (first and last query, first and
    last key). `read` has the rows of all keys."""

    rows: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor | None
    lengths: torch.Tensor
    at: torch.Tensor | None
    pieces: list[tuple[int, int, int, int]]
    read: torch.Tensor


@dataclass
class Kept:
    """What attnplug keeps of one paged cache: the layers that it has met, with their method and its
    state, and the batch of the pass that runs."""

    layers: dict[int, tuple[LayerPages, Any, Any]] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    token: Any = None
    last: int = -1

    def note_copies(self, group: int | None, blocks: list[int]) -> None:
        """Whole pages of a group (None: of any) were copied: methods look at all of their keys
        again. A block that is not complete yet gets a summary that nobody reads, and the right one
        when it is."""
        for pages, method, state in self.layers.values():
            if group in (None, pages.group) and blocks and state is not None:
                size = pages.k.shape[2]
                first = (
                    torch.tensor(blocks, device=pages.k.device, dtype=torch.int64)[:, None] * size
                )
                slots = first + torch.arange(size, device=pages.k.device)
                method.note_pages(pages.k, state, slots.flatten())


def register_paged_names() -> None:
    """Make transformers know the attention of continuous batching (idempotent). No mask function is
    registered: under such a name transformers builds no mask."""
    for name in PAGED_NAMES:
        AttentionInterface.register(name, paged_attention)


def paged_name(manager_class: type) -> str:
    """The attention's name that this version's managers accept."""
    switch = getattr(manager_class, "switch_to_cb_friendly_attn", None)
    new = switch is not None and "auto_switch_to_flash" in inspect.signature(switch).parameters
    return PAGED_NAMES[0] if new else PAGED_NAMES[1]


# --- the paged cache -------------------------------------------------------------------------


def layer_pages(cache: Any, layer: int) -> LayerPages | None:
    """One layer of transformers' paged cache; None for a sliding-window layer, whose rows roll."""
    if hasattr(cache, "key_cache"):
        return _pages_of_lists(cache, layer)
    allocator = cache.layer_to_allocator[layer]
    if hasattr(allocator, "sliding_window"):
        return None
    step, page = allocator.block_physical_stride, allocator.tokens_per_page
    # Pages of all layers lie between two of this one, in block order.
    k, v = (x[:: step // page].transpose(1, 2) for x in allocator._kv_page_views[layer])
    row_k, row_v = allocator._kv_token_views[layer]
    return LayerPages(k, v, row_k, row_v, step, allocator.index, allocator.write_trash_index)


def _pages_of_lists(cache: Any, layer: int) -> LayerPages | None:
    """The same of 5.17, whose cache is a list of tensors."""
    if cache.sliding_windows[layer] != 1:
        return None
    group, place = cache.layer_index_to_group_indices[layer]
    row_k, row_v, page = cache.key_cache[place], cache.value_cache[place], cache.block_size
    k, v = (x.view(-1, page, *x.shape[1:]).transpose(1, 2) for x in (row_k, row_v))
    return LayerPages(k, v, row_k, row_v, page, group, cache.write_trash_index)


def _copy_methods(cache: Any) -> list[tuple[Any, str, int | None]]:
    """Where a cache copies pages of a group: (object, its method (source, destination), group)."""
    if hasattr(cache, "key_cache"):
        return [(cache, "copy_cache", None)]
    return [(x, "copy_blocks", x.index) for x in cache.cache_allocators.values()]


def _blocks_of(cache: Any, group: int, request: str) -> list[int]:
    """The blocks that a request has in a group."""
    if hasattr(cache, "key_cache"):
        return list(cache.group_cache_managers[group].block_table.get(request, ()))
    found = [x for x in cache.cache_allocators.values() if x.index == group]
    return list(found[0].block_table.get(request, ()))


def kept_of(cache: Any) -> Kept:
    """What attnplug keeps of a cache."""
    if KEPT not in vars(cache):
        vars(cache)[KEPT] = Kept()
    return vars(cache)[KEPT]


def adopt(cache: Any, layers: dict[int, Any], offloading: Any, on_stream: Any) -> None:
    """Make what methods keep beside a fresh cache's pages, for the policies of `layers`, and have
    it follow where transformers copies pages: for a fork, and back from host memory by
    `offloading`, on the stream that `on_stream()` enters."""
    kept = kept_of(cache)
    for layer, policy in layers.items():
        pages = layer_pages(cache, layer)
        if pages is not None:
            method = policy.page_phase
            kept.layers[layer] = pages, method, method.page_state(pages.k)
    if MODULES_WRITE:
        vars(cache)["update"] = _handing_over(kept, cache, cache.update)
    for owner, name, group in _copy_methods(cache):
        vars(owner)[name] = _noting_copies(kept, getattr(owner, name), group)
    if offloading is not None:
        stock = offloading.restore_scheduled_requests
        offloading.restore_scheduled_requests = _noting_restores(kept, cache, stock, on_stream)


def _handing_over(kept: Kept, cache: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """What a module calls before its attention. The attention gets the cache, and itself writes the
    keys of a layer that a policy serves; those of other layers are written here."""

    def update(
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kwargs["cache"] = cache
        if layer_idx in kept.layers:
            return key_states, value_states
        return stock(key_states, value_states, layer_idx, kwargs)

    return update


def _noting_copies(kept: Kept, stock: Callable[..., Any], group: int | None) -> Callable[..., Any]:
    def copy(source: list[int], destination: list[int]) -> Any:
        result = stock(source, destination)
        kept.note_copies(group, list(destination))
        return result

    return copy


def _noting_restores(
    kept: Kept, cache: Any, stock: Callable[..., Any], on_stream: Any
) -> Callable[..., Any]:
    def restore(requests: Any) -> Any:
        names = [x.state.request_id for x in requests if x.state.is_cpu_offloaded]
        result = stock(requests)
        with on_stream():
            for group in {pages.group for pages, *_ in kept.layers.values()}:
                kept.note_copies(group, [b for x in names for b in _blocks_of(cache, group, x)])
        return result

    return restore


# --- a forward pass --------------------------------------------------------------------------


@torch.compiler.disable  # it reads lengths on the host, and the cache's views of bytes do not trace
def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function of continuous batching. Returns `[1,N,Hq,D]`."""
    refuse_options(query, dropout, kwargs)
    cache, binding = kwargs.get("cache"), binding_of(module)
    if cache is None or binding is None or attention_mask is not None:
        raise UnsupportedCallError(
            "continuous batching runs on this model, which may not be called otherwise meanwhile: "
            "stop its manager first."
        )
    if binding.trace_to is not None:
        raise UnsupportedCallError("a trace is recorded of generate, not of continuous batching")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, scale, softcap or 0.0, s_aux)
    policy: Any = binding.policy
    kept, layer = kept_of(cache), int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    if layer not in kept.layers:
        return _stock_layer(module, binding, call, cache, kwargs), None
    pages, method, state = kept.layers[layer]
    batch = _batch_of(kept, pages, layer, query.shape[2], kwargs)
    pages.write(batch.rows, key, value)
    method.note_pages(pages.k, state, batch.slots)
    out = torch.zeros_like(query)
    if batch.table is not None:
        binding.note_served(1, Served(method.name, method.pages_note(query.device)))
        _decode(method, pages, state, batch, call, out)
    for a, b, c, d in batch.pieces:
        k, v = key[:, :, a:b], value[:, :, a:b]
        if d - c > b - a:
            rows = batch.read[c:d]
            k, v = (
                x.index_select(0, rows).transpose(0, 1)[None] for x in (pages.row_k, pages.row_v)
            )
        piece = AttentionCall(query[:, :, a:b], k, v, scale, call.softcap, s_aux)
        out[:, :, a:b] = policy.attend_prompt(piece)
        binding.served["prefill"] = Served(piece.served_by, piece.why_dense)
    return out.transpose(1, 2).contiguous(), None


def _decode(
    method: Any, pages: LayerPages, state: Any, batch: Batch, call: AttentionCall, out: torch.Tensor
) -> None:
    """The requests of one token, all at once; their outputs to `out [1,Hq,N,D]`."""
    assert batch.table is not None
    q = call.q[0] if batch.at is None else call.q[0].index_select(1, batch.at)
    rows = PagedCall(
        q.transpose(0, 1)[:, :, None],
        pages.k,
        pages.v,
        batch.table,
        batch.lengths,
        call.scale,
        call.softcap,
        call.sinks,
        state,
    )
    found = method.attend_pages(rows)
    check_output(method.name, rows.q, found)
    found = found[:, :, 0].transpose(0, 1)
    if batch.at is None:
        out[0].copy_(found)
    else:
        out[0].index_copy_(1, batch.at, found)


def _batch_of(
    kept: Kept, pages: LayerPages, layer: int, tokens: int, kwargs: dict[str, Any]
) -> Batch:
    """The pass's batch, made for the first layer of each group: layers come in order, and a pass
    has arguments of its own."""
    token = kwargs["cu_seq_lens_q"]
    if token is not kept.token or layer <= kept.last:
        kept.batches.clear()
        kept.token = token
    kept.last = layer
    if pages.group not in kept.batches:
        table = kwargs.get("block_table")
        ends = _key_ends(kwargs, "full_attention")
        if table is None:
            index = kwargs["read_index"][pages.group], kwargs["write_index"][pages.group]
            batch = _indexed(pages, token.tolist(), ends.tolist(), *index)
        else:
            batch = _tabled(pages, table[pages.group][:tokens], ends)
        kept.batches[pages.group] = batch
    return kept.batches[pages.group]


def _key_ends(kwargs: dict[str, Any], kind: str) -> torch.Tensor:
    ends = kwargs["cu_seq_lens_k"]
    return ends[kind] if isinstance(ends, dict) else ends


def _tabled(pages: LayerPages, table: torch.Tensor, ends: torch.Tensor) -> Batch:
    """A batch of requests of one token each: nothing is read on the host. transformers' table
    counts the pages of all layers; rows that pad the batch have no keys."""
    page = pages.k.shape[2]
    table = table // (pages.step // page)
    lengths = (ends[1 : len(table) + 1] - ends[: len(table)]).int()
    last = (lengths - 1).clamp(min=0).long()
    own = table.gather(1, (last // page)[:, None])[:, 0].long()
    real = lengths > 0
    rows = torch.where(real, own * pages.step + last % page, pages.trash)
    slots = torch.where(real, own * page + last % page, -1)
    return Batch(rows, slots, table.int(), lengths, None, [], rows)


def _indexed(
    pages: LayerPages,
    queries: list[int],
    keys: list[int],
    read: torch.Tensor,
    write: torch.Tensor,
) -> Batch:
    """A batch that says where every key lies."""
    spans = [
        (queries[r], queries[r + 1], keys[r], keys[r + 1])
        for r in range(len(queries) - 1)
        if queries[r + 1] > queries[r]
    ]
    steps = [x for x in spans if x[1] - x[0] == 1 and x[3] - x[2] > 1] if len(read) else []
    pieces = [x for x in spans if x not in steps]
    slots = pages.slots(write)
    if not steps:
        return Batch(write, slots, None, slots[:0], None, pieces, read)
    page = pages.k.shape[2]
    wide = max(-(-(d - c) // page) for _, _, c, d in steps)
    first = [[min(c + p * page, d - 1) for p in range(wide)] for _, _, c, d in steps]
    table = (read[torch.tensor(first, device=read.device, dtype=torch.int64)] // pages.step).int()
    counted = [(d - c, a) for a, _, c, d in steps]
    lengths, at = torch.tensor(counted, device=read.device, dtype=torch.int64).unbind(1)
    return Batch(write, slots, table, lengths.int(), at.contiguous(), pieces, read)


# --- layers left to the model ----------------------------------------------------------------


def _stock_layer(
    module: torch.nn.Module, binding: Any, call: AttentionCall, cache: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    """A layer that no policy serves: transformers writes and reads its keys, and each request is a
    call of the model's own attention."""
    if kwargs.get("block_table") is not None:
        raise UnsupportedCallError(
            f"{type(module).__name__} {module.layer_idx} has no policy, and transformers handed "
            "over a block table: pass ContinuousBatchingConfig(max_blocks_per_request=0)."
        )
    window = getattr(module, "sliding_window", None)
    key, value = call.k, call.v
    if not MODULES_WRITE:
        key, value = _updated(cache, key, value, int(module.layer_idx), kwargs)  # pyright: ignore[reportArgumentType]
    kind = "sliding_attention" if window else "full_attention"
    queries, keys = kwargs["cu_seq_lens_q"].tolist(), _key_ends(kwargs, kind).tolist()
    out = torch.zeros_like(call.q).transpose(1, 2)
    for r in range(len(queries) - 1):
        a, b, c, d = *queries[r : r + 2], *keys[r : r + 2]
        if b > a:
            own = call.q[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
            one = AttentionCall(*own, call.scale, call.softcap, call.sinks)
            sees_all = b - a == 1 and (window is None or d - c <= window)
            mask = None if sees_all else band_mask(b - a, d - c, window, call.q.device)
            out[:, a:b] = stock_attention(module, binding, one, mask, False, {})[0]
    return out


def _updated(
    cache: Any, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of the batch's requests, `[1,Hkv,sum S,D]`."""
    more: dict[str, Any] = {
        "read_index": kwargs["read_index"],
        "write_index": kwargs["write_index"],
    }
    if "kwargs" in inspect.signature(cache.update).parameters:
        more = {"kwargs": dict(kwargs)}
    found = cache.update(key_states=key, value_states=value, layer_idx=layer, **more)
    key, value = (x if x.dim() == 4 else x.transpose(0, 1)[None] for x in found)
    return key, value
