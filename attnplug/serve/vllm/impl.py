"""One attention layer inside vLLM: FlashAttention, and attnplug's methods for the rows that they
serve."""

import functools
from typing import Any, ClassVar

import torch
from vllm import _custom_ops
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from attnplug.serve.paged.layer import LayerTraits, ServedLayer, phases_for
from attnplug.serve.paged.pages import Pages
from attnplug.serve.paged.rows import Run
from attnplug.serve.vllm.basis import basis_of, check_basis
from attnplug.serve.vllm.layout import flash_pages
from attnplug.serve.vllm.options import FP8_CACHES, check_cache, check_server, policy_of
from attnplug.serve.vllm.profile import prepare

logger = init_logger("vllm.attnplug")


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
        self.serving: ServedLayer | None = None

    def served(self, layer_name: str, device: torch.device) -> ServedLayer:
        """What serves the layer of this name, decided once."""
        if self.serving is None:
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
            self.serving = ServedLayer(
                phases,
                scale=self.scale,
                softcap=float(self.logits_soft_cap),
                sinks=self.sinks,
                device=device,
                index=index,
                why=why,
                basis=basis_of(self.config, phases, layer_name, self.num_kv_heads, device),
            )
        return self.serving

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
        if plain and served.phases.sparse:
            served.overruled = "vLLM asks for a scaled output" if scales else "calls are not causal"
        if plain:
            served.note_dense(m.batch.prompts)
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
        served.note_dense(row for run in runs if not run.sparse for row in run.rows)
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
