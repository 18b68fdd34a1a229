"""What vLLM sees of attnplug: an attention backend on top of vLLM's own FlashAttention.

Rows that no sparse method serves, layers that it cannot serve, and whatever else vLLM does with a
backend go to FlashAttention as they come. Steps run inside full CUDA graphs, so that which of their
rows are far, and the decode method's, is decided on the device (`RowCrossover`). gather reads the
near rows of such a step itself. With gvr and sketch, and beside prompts, FlashAttention gets the
lengths of the near rows and 0 for the others, the method the reverse.
"""

import dataclasses
from typing import Any

import torch
from vllm.config import (
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from attnplug.ops.common.divide_rows import divide_rows
from attnplug.policies import Phase
from attnplug.serve.paged.basis import Positions
from attnplug.serve.paged.layer import Far
from attnplug.serve.paged.rows import Batch, batch_of
from attnplug.serve.paged.tally import StepRows
from attnplug.serve.vllm.impl import PlugImpl
from attnplug.serve.vllm.metadata import PlugMetadata
from attnplug.serve.vllm.options import (
    CACHES,
    FP8_CACHES,
    VLLM,
    check_server,
    policy_of,
)
from attnplug.serve.vllm.profile import most_rows

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
    def get_impl_cls() -> type[PlugImpl]:
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
    phase = phase.for_requests(longest)
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
        self.steps, self.capturing = StepRows(), False
        for layer in served:
            layer.steps = self.steps
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

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """For a batch that vLLM makes up, and that nobody counts."""
        self.capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self.capturing = False

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
        if not self.capturing:
            self.steps.note(batch.step_keys, self.rule)
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
