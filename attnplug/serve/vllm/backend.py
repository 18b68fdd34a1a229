"""What vLLM sees of attnplug: an attention backend on top of vLLM's own FlashAttention.

Rows that no sparse method serves, layers that it cannot serve, and whatever else vLLM does with a
backend go to FlashAttention as they come. Steps run inside full CUDA graphs, so that which of their
rows are long enough for gather is decided on the device: FlashAttention gets the lengths of the
short rows and 0 for the others, gather the reverse.
"""

import dataclasses
from typing import Any

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
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

from attnplug.serve.vllm.layer import Far, LayerTraits, ServedLayer, phases_for
from attnplug.serve.vllm.layout import pages
from attnplug.serve.vllm.options import check_server, policy_of
from attnplug.serve.vllm.profile import prepare
from attnplug.serve.vllm.rows import Batch, Run, batch_of

logger = init_logger("vllm.attnplug")


class PlugBackend(FlashAttentionBackend):
    """FlashAttention with attnplug's policies; a page is one block of gather's, or several."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks this name up in its registry

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        gather = policy_of(get_current_vllm_config()).decode
        if gather is None:
            return FlashAttentionBackend.get_supported_kernel_block_sizes()
        return [MultipleOf(gather.block)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        gather = policy_of(get_current_vllm_config()).decode
        if gather is None:
            return super().get_preferred_block_size(default_block_size)
        return gather.block

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        # A KV head's page in one piece of memory.
        return None if policy_of(get_current_vllm_config()).decode is None else "HND"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto", "float16", "bfloat16")

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        config = get_current_vllm_config()
        check_server(config, policy_of(config))
        return super().validate_configuration(*args, **options)

    @staticmethod
    def get_impl_cls() -> type["PlugImpl"]:
        return PlugImpl

    @staticmethod
    def get_builder_cls() -> type["PlugBuilder"]:
        return PlugBuilder


@dataclasses.dataclass
class PlugMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata of a batch, and what attnplug's layers need besides.

    `whole` is the metadata of the same batch with a length of 0 for the rows that gather serves,
    which `far` says; both are None where no layer has gather.
    """

    batch: Batch = dataclasses.field(default_factory=lambda: batch_of([0], []))
    whole: FlashAttentionMetadata | None = None
    far: Far | None = None
    parts: dict[Any, FlashAttentionMetadata] = dataclasses.field(default_factory=dict)

    def part(self, first: int, last: int, tokens: slice, longest: int, *, whole: bool = False):
        """The metadata of rows `first` to `last - 1` alone, whose tokens are at `tokens`. Without
        the schedule that FlashAttention made of the batch: it is that of all rows."""
        key = first, last, whole
        if key not in self.parts:
            base = self.whole if whole else self
            assert base is not None  # asked for where a layer has gather
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
        froms = {layer.decode_from for layer in served if layer.phases.decode is not None}
        self.decode_from = froms.pop() if froms else None  # one gather serves all layers
        if self.decode_from is not None:
            scheduler = self.vllm_config.scheduler_config
            rows = max(scheduler.max_num_seqs, self.max_cudagraph_size or 0)
            # Graphs read these where they are.
            self._near = torch.zeros(rows, dtype=torch.int32, device=self.device)
            self._far = Far(
                torch.zeros(rows, dtype=torch.int32, device=self.device),
                torch.zeros(rows, dtype=torch.bool, device=self.device),
            )
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
        built = super().build(common_prefix_len, common, fast_build)
        batch = batch_of(
            common.query_start_loc_cpu.tolist(),
            common.seq_lens_cpu_upper_bound.tolist(),  # exact: no speculative decoding here
        )
        made = PlugMetadata(**vars(built), batch=batch)
        if self.decode_from is not None and batch.steps:
            near, far = self._near[: common.num_reqs], self._far.first(common.num_reqs)
            torch.ge(common.seq_lens, self.decode_from, out=far.chosen)
            torch.mul(common.seq_lens, far.chosen, out=far.lengths)
            torch.sub(common.seq_lens, far.lengths, out=near)
            made.far = far
            made.whole = self._build_near(common, near, fast_build)
        return made

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
    """One layer: FlashAttention, with momo for long prompts and gather for long rows' steps."""

    can_return_lse_for_decode = False  # vLLM then refuses decode context parallelism

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.config = get_current_vllm_config()
        self.policy = policy_of(self.config)
        check_server(self.config, self.policy)
        self.profiled = False
        self._served: ServedLayer | None = None

    def served(self, layer_name: str, device: torch.device) -> ServedLayer:
        """What serves the layer of this name, decided once."""
        if self._served is None:
            # Not every name has one index; only spans need it.
            index = extract_layer_index(layer_name) if self.policy.spans else 0
            asked = self.policy.of_layer(index)
            traits = LayerTraits(
                head_dim=self.head_size,
                longest=self.config.model_config.max_model_len,
                device=device,
                left_dense=self._left_dense(),
            )
            phases, why = phases_for(asked, traits)
            logger.info_once(
                "attnplug: prefill %s, decode %s%s",
                phases.prefill or "dense",
                phases.decode or "dense",
                f" ({why})" if why else "",
            )
            self._served = ServedLayer(
                phases,
                scale=self.scale,
                softcap=float(self.logits_soft_cap),
                sinks=self.sinks,
                device=device,
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
        if served.summaries is not None:
            k, _ = pages(kv_cache, heads_first=False)
            served.summaries.update(k, slot_mapping)

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
        if attn_metadata is None:
            if kv_cache.numel() == 0:
                prepare(self, query.dtype, query.device)
            return output.fill_(0)
        m = attn_metadata
        scales = output_scale is not None or output_block_scale is not None
        if scales or not served.phases.sparse or not m.causal:
            more = dict(output_scale=output_scale, output_block_scale=output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, m, output, **more)
        if m.batch.prompts:
            self._attend_mixed(served, layer, query, key, value, kv_cache, m, output)
        elif served.phases.decode is None:
            super().forward(layer, query, key, value, kv_cache, m, output)
        else:
            super().forward(layer, query, key, value, kv_cache, m.whole, output)
            rows = m.far.lengths.shape[0]
            cache = pages(kv_cache, heads_first=False)
            served.attend_steps(query[:rows], cache, m.block_table, m.far, output[:rows])
        return output

    def _attend_mixed(self, served, layer, query, key, value, kv_cache, m, output) -> None:
        """A batch with prompts, eagerly: runs of its rows, each by what serves it."""
        batch, cache = m.batch, pages(kv_cache, heads_first=False)
        runs = list(batch.runs(served.serves_prompt))
        gathers = served.phases.decode is not None and batch.longest_step >= served.decode_from
        if not gathers and not any(run.sparse for run in runs):
            super().forward(layer, query, key, value, kv_cache, m, output)
            return
        if batch.steps:
            steps = slice(0, batch.steps)
            part = m.part(0, batch.steps, steps, 1, whole=gathers)
            self._attend_dense(layer, steps, part, query, kv_cache, output)
            if gathers:
                table, far = m.block_table[steps], m.far.first(batch.steps)
                served.attend_steps(query[steps], cache, table, far, output[steps])
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
        super().forward(layer, query[tokens], None, None, kv_cache, part, output[tokens])
