"""What vLLM sees of attnplug: an attention backend on top of vLLM's own FlashAttention.

Rows that no sparse method serves, layers that it cannot serve, and whatever else vLLM does with a
backend go to FlashAttention as they come. Steps run inside full CUDA graphs, so that which of their
rows are far, and the decode method's, is decided on the device (`RowCrossover`). gather reads the
near rows of such a step itself. With gvr and sketch, and beside prompts, FlashAttention gets the
lengths of the near rows and 0 for the others, the method the reverse.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from vllm import _custom_ops
from vllm.config import (
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from attnplug.ops.common.divide_rows import divide_rows
from attnplug.policies import Phase
from attnplug.serve.paged.basis import Positions
from attnplug.serve.paged.layer import Far, LayerTraits, ServedLayer, phases_for
from attnplug.serve.paged.pages import Pages
from attnplug.serve.paged.rows import Batch, Run, batch_of
from attnplug.serve.vllm.basis import basis_of, check_basis
from attnplug.serve.vllm.layout import flash_pages
from attnplug.serve.vllm.metadata import PlugMetadata
from attnplug.serve.vllm.options import (
    CACHES,
    FP8_CACHES,
    VLLM,
    check_cache,
    check_server,
    policy_of,
)
from attnplug.serve.vllm.profile import most_rows, prepare

logger = init_logger("vllm.attnplug")


class PlugBackend(FlashAttentionBackend):
    """FlashAttention with attnplug's policies. Where gather decodes, a page is one block, or
    several."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks this name up in its registry

    @classmethod
    def get_supported_kernel_block_sizes(cls, *spec: Any) -> list[Any]:
        """Newer versions of vLLM name the `spec` of the layers. Where FlashAttention takes certain
        sizes only, those that are whole blocks."""
        sizes, block = super().get_supported_kernel_block_sizes(*spec), _block()
        if block is None:
            return sizes
        whole = [size for size in sizes if isinstance(size, int) and size % block == 0]
        return whole or [MultipleOf(block)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        size, block = super().get_preferred_block_size(default_block_size), _block()
        return size if block is None or size % block == 0 else block

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        # A KV head's page in one piece of memory.
        return None if _decode_phase() is None else "HND"

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """What newer versions ask for instead: the same, with layers outside or inside of a
        page."""
        if _decode_phase() is None:
            return super().supported_kv_cache_layouts()
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        if kv_cache_dtype in FP8_CACHES:
            return super().supports_kv_cache_dtype(kv_cache_dtype)
        return kv_cache_dtype in (None, *CACHES)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    # What a query sees besides earlier keys, or no longer, stands in tensors by token and by row,
    # which `PlugMetadata.part` would hand on whole.
    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    supports_kv_cache_update_bypass = False  # `do_kv_cache_update` must see each key that comes

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        config = get_current_vllm_config()
        check_server(config, policy_of(config))
        asked = config.cache_config.cache_dtype
        if not cls.supports_kv_cache_dtype(asked):
            raise VLLM.error(
                f"--kv-cache-dtype {asked}: dense rows are FlashAttention's, which reads no fp8 "
                "cache on this GPU (FlashAttention 3 does on Hopper); use auto, or bfloat16 where "
                "the checkpoint asks for fp8"
            )
        return super().validate_configuration(*args, **options)

    @staticmethod
    def get_impl_cls() -> type["PlugImpl"]:
        return PlugImpl

    @staticmethod
    def get_builder_cls() -> type["PlugBuilder"]:
        return PlugBuilder


def _config() -> Any:
    """vLLM's configuration. Newer workers ask for the cache's layouts outside of it: then it is
    that of the layers which this process has made."""
    found = get_current_vllm_config_or_none() or PlugImpl.made_for
    return get_current_vllm_config() if found is None else found  # the former says what is wrong


def _decode_phase() -> Phase | None:
    """The method that decodes. None also where no batch can have a row for it: what vLLM then sees
    is FlashAttention's own layout."""
    config = _config()
    phase = policy_of(config).decode
    if phase is None:
        return None
    rows, longest = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    rule = phase.row_crossover(torch.device("cuda"))  # vLLM's CPU platform asks nobody here
    return phase if rule.reachable(rows, longest) else None


def _block() -> int | None:
    """The keys of a block of gather's, None where another method decodes."""
    return getattr(_decode_phase(), "block", None)


class PlugBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's builder, which also tells layers of the batch's rows."""

    # Full graphs for batches of steps alone; prompts run attention eagerly between graphs.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False  # `parts` hold block tables

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._init_reorder_batch_threshold(1)  # steps first
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        served = [
            layer.impl.served(layer.layer_name, self.device)
            for layer in layers.values()
            if isinstance(layer.impl, PlugImpl)
        ]
        traced = {layer.index for layer in served if layer.phases.trace is not None}
        self.requests = None
        if traced:  # writing files needs packages that serving does not
            from attnplug.serve.vllm.requests import note_traced

            self.requests = note_traced(self.vllm_config, traced)
        decoding = [layer for layer in served if layer.phases.decode is not None]
        # In steps of so many rows gather serves all rows of its layers, and all layers are its.
        self.rows_whole = min((layer.rows_whole for layer in decoding), default=0)
        self.rows_alone = self.rows_whole if len(decoding) == len(layers) else 0
        rules = {layer.rule for layer in served if layer.rule is not None}
        self.rule = rules.pop() if rules else None  # one method decodes in all layers
        if self.rule is not None:
            rows = most_rows(self.vllm_config)
            # Graphs read these where they are.
            self._near = torch.zeros(rows, dtype=torch.int32, device=self.device)
            self._far = Far(
                torch.zeros(rows, dtype=torch.int32, device=self.device),
                torch.zeros(rows, dtype=torch.bool, device=self.device),
                self._near,
            )
            needed = any(layer.needs_positions for layer in served)
            most = max(rows, self.vllm_config.scheduler_config.max_num_batched_tokens)
            self._positions = Positions(most, self.device) if needed else None
            if self.use_full_cuda_graph and self.aot_schedule:
                self._near_schedule = torch.zeros_like(self.scheduler_metadata)

    def use_cascade_attention(self, *args: Any, **options: Any) -> bool:
        return False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PlugMetadata:
        common = common_attn_metadata
        batch = batch_of(
            common.query_start_loc_cpu.tolist(),
            common.seq_lens_cpu_upper_bound.tolist(),  # exact: no speculative decoding here
        )
        built = super().build(common_prefix_len, common, fast_build or self._alone(common, batch))
        made = PlugMetadata(**vars(built), batch=batch)
        if self.requests is not None:
            made.traced = self.requests.traced(batch)
        if self.rule is not None and self._positions is not None:
            rows = common.query_start_loc, common.seq_lens
            made.positions = self._positions.of(*rows, common.num_actual_tokens)
        if self.rule is None or not batch.steps:
            return made
        # A graph of few rows, in which none can be far, is captured without the method's kernels:
        # it is replayed for batches that are padded to as many rows, and they decide alike.
        longest = self.vllm_config.model_config.max_model_len
        if not self.rule.reachable(batch.steps, longest):
            return made
        keys = torch.tensor(batch.step_keys, dtype=torch.int64, device="cpu")
        if batch.prompts and not self.rule.far(keys).any():
            return made  # it runs eagerly, and may look at lengths on the host
        near, far = self._near[: common.num_reqs], self._far.first(common.num_reqs)
        rule = {"row": self.rule.row, "alone": self.rule.alone, "steps": batch.steps}
        divide_rows(common.seq_lens, near, far.lengths, far.chosen, **rule)
        made.far = far
        if batch.prompts or common.num_reqs > self.rows_whole:
            made.whole = self._build_near(common, near, fast_build)
        return made

    def _alone(self, common: CommonAttentionMetadata, batch: Batch) -> bool:
        """Whether FlashAttention serves no row of the batch, and so needs no schedule. The first
        batch, from which it learns its window, has one in any case."""
        if batch.prompts or self.rule is None or self.aot_sliding_window is None:
            return False
        longest = self.vllm_config.model_config.max_model_len
        return common.num_reqs <= self.rows_alone and self.rule.reachable(batch.steps, longest)

    def _build_near(
        self, common: CommonAttentionMetadata, near: torch.Tensor, fast_build: bool
    ) -> FlashAttentionMetadata:
        """FlashAttention's metadata with the lengths `near`, and a schedule of its own."""
        common = dataclasses.replace(common, seq_lens=near)
        if not (self.use_full_cuda_graph and self.aot_schedule):
            return super().build(0, common, fast_build)
        own, self.scheduler_metadata = self.scheduler_metadata, self._near_schedule
        try:
            return super().build(0, common, fast_build)
        finally:
            self.scheduler_metadata = own


class PlugImpl(FlashAttentionImpl):
    """One layer: FlashAttention, with momo for long prompts and the method that decodes for far
    rows' steps."""

    # vLLM then refuses decode context parallelism: older versions by the first of them.
    can_return_lse_for_decode = False
    supports_dcp = False
    made_for: ClassVar[Any] = None  # the configuration of the layer that was made last

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.config = get_current_vllm_config()
        PlugImpl.made_for = self.config
        self.policy = policy_of(self.config)
        check_server(self.config, self.policy)
        model = self.config.model_config.dtype
        check_cache(self.kv_cache_dtype, self.policy, model)  # with auto, what the checkpoint says
        if self.policy.decode is not None and self.policy.decode.has_model_basis:
            check_basis(self.config)  # before the weights are loaded
        self.profiled, self.fp8 = False, self.kv_cache_dtype in FP8_CACHES
        # FlashAttention reads fp8 keys with fp8 queries, the methods with the model's own. So
        # vLLM's layer, which asks for this now, leaves them alone, and `_flash` quantizes them.
        self.quantizes = self.fp8 and self.supports_quant_query_input
        if self.quantizes:
            self.supports_quant_query_input = False
        self._written: torch.Tensor | None = None  # slots that nobody has noted yet
        self._served: ServedLayer | None = None

    def served(self, layer_name: str, device: torch.device) -> ServedLayer:
        """What serves the layer of this name, decided once."""
        if self._served is None:
            # Not every name has one index; only spans and traces need it.
            named = self.policy.spans or self.policy.trace is not None
            index = extract_layer_index(layer_name) if named else 0
            asked = self.policy.of_layer(index)
            traits = LayerTraits(
                head_dim=self.head_size,
                longest=self.config.model_config.max_model_len,
                rows=self.config.scheduler_config.max_num_seqs,
                device=device,
                softcap=float(self.logits_soft_cap),
                left_dense=self._left_dense(),
            )
            phases, why = phases_for(asked, traits)
            logger.info_once(
                "attnplug: prefill %s, decode %s%s%s",
                phases.prefill or "dense",
                phases.decode or "dense",
                f", trace {phases.trace}" if phases.trace else "",
                f" ({why})" if why else "",
            )
            self._served = ServedLayer(
                phases,
                scale=self.scale,
                softcap=float(self.logits_soft_cap),
                sinks=self.sinks,
                device=device,
                index=index,
                basis=basis_of(self.config, phases, layer_name, self.num_kv_heads, device),
            )
        return self._served

    def _left_dense(self) -> str:
        """Why FlashAttention must serve the layer, "" where it need not."""
        reasons = {
            "no decoder self-attention": self.attn_type != AttentionType.DECODER,
            "a sliding window": self.sliding_window != (-1, -1),
            "ALiBi": self.alibi_slopes is not None,
            "another layer's cache": self.kv_sharing_target_layer_name is not None,
        }
        return next((f"the layer has {why}" for why, true in reasons.items() if true), "")

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        served = self.served(layer.layer_name, key.device)
        if served.notes_in_step or served.needs_positions:
            self._written = slot_mapping  # `forward` comes next, and knows of the batch's rows
        elif served.state is not None:
            self._note(served, layer, kv_cache, slot_mapping, None)

    def _note(self, served, layer, kv_cache, slots: torch.Tensor | None, m) -> None:
        if slots is None:
            return
        cache = self._pages(layer, kv_cache)
        if not served.needs_positions:
            served.state.update(cache.k, slots)
        elif m is not None:  # else nothing is computed, and nothing was written
            served.state.code(cache, slots, m.positions[: len(slots)])

    def _pages(self, layer, kv_cache) -> Pages:
        found = flash_pages(kv_cache)
        return found.in_fp8(layer._k_scale, layer._v_scale) if self.fp8 else found

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
        served = self.served(layer.layer_name, query.device)
        m, (written, self._written) = attn_metadata, (self._written, None)
        scales = output_scale is not None or output_block_scale is not None
        if m is None:
            self._note(served, layer, kv_cache, written, m)
            if kv_cache.numel() == 0:
                prepare(self, query.dtype, query.device)
            return output.fill_(0)
        plain = scales or not served.phases.sparse or m.causal is not True
        if plain or m.batch.prompts or m.far is None or served.needs_positions:
            self._note(served, layer, kv_cache, written, m)
        if plain:
            more = dict(output_scale=output_scale, output_block_scale=output_block_scale)
            self._flash(layer, query, key, value, kv_cache, m, output, **more)
        else:
            self._attend(served, layer, query, key, value, kv_cache, m, output, written)
        if served.phases.trace is not None and m.causal is True:
            for traced in m.traced:  # of prompts, whose attention runs eagerly
                cache = self._pages(layer, kv_cache)
                served.trace_prompt(traced, query, key, value, cache, m.block_table)
        return output

    def _attend(self, served, layer, query, key, value, kv_cache, m, output, written) -> None:
        """Each row of a batch by what serves it. Steps alone note the slots that are `written`."""
        if m.batch.prompts:
            self._attend_mixed(served, layer, query, key, value, kv_cache, m, output)
        elif served.phases.decode is None or m.far is None:
            self._flash(layer, query, key, value, kv_cache, m, output)
        else:
            whole = layer, query, key, value, kv_cache, m.whole, output
            rows, dense = m.far.lengths.shape[0], functools.partial(self._flash, *whole)
            steps = query[:rows], self._pages(layer, kv_cache), m.block_table, m.far
            slots = None if written is None else written[:rows]
            served.attend_steps(*steps, output[:rows], slots=slots, dense=dense)

    def _attend_mixed(self, served, layer, query, key, value, kv_cache, m, output) -> None:
        """A batch with prompts, eagerly: runs of its rows, each by what serves it."""
        batch, cache = m.batch, self._pages(layer, kv_cache)
        runs = list(batch.runs(served.serves_prompt))
        far = None if served.phases.decode is None else m.far
        if far is None and not any(run.sparse for run in runs):
            self._flash(layer, query, key, value, kv_cache, m, output)
            return
        if batch.steps:
            steps = slice(0, batch.steps)
            part = m.part(0, batch.steps, steps, 1, whole=far is not None)
            self._attend_dense(layer, steps, part, query, kv_cache, output)
            if far is not None:
                rows = m.block_table[steps], far.first(batch.steps)
                served.attend_steps(query[steps], cache, *rows, output[steps])
        for run in runs:
            if run.sparse:
                row = run.rows[0]
                served.attend_prompt(row, query, key, value, cache, m.block_table, output)
            else:
                self._attend_run(run, layer, query, kv_cache, m, output)

    def _attend_run(self, run: Run, layer, query, kv_cache, m, output) -> None:
        first, last = run.rows[0].index, run.rows[-1].index + 1
        part = m.part(first, last, run.tokens, run.longest)
        self._attend_dense(layer, run.tokens, part, query, kv_cache, output)

    def _attend_dense(self, layer, tokens: slice, part, query, kv_cache, output) -> None:
        """FlashAttention for the tokens of some rows; it reads keys from the pages."""
        self._flash(layer, query[tokens], None, None, kv_cache, part, output[tokens])

    def _flash(self, layer, query, *rest, **more) -> None:
        """FlashAttention, which descales queries where it takes them for quantized."""
        if self.quantizes:
            self.supports_quant_query_input = True
            flat, _ = _custom_ops.scaled_fp8_quant(query.flatten(1), layer._q_scale)
            query = flat.view(query.shape)
        super().forward(layer, query, *rest, **more)
