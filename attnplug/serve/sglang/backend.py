"""What SGLang sees of attnplug: an attention backend over SGLang's own FlashAttention backend.

The base keeps a batch's lengths, page tables and graph buffers, and serves rows and layers that no
sparse method does. momo takes prompts, row by row. Steps whose rows can be far are gather's alone:
it reads near rows whole, in the same kernels. Which rows are far is decided on the device, inside
the CUDA graph, from the lengths that the base has put in place.

SGLang is not imported here: `backend_class` is given the base.
"""

import copy
import dataclasses
import logging
from typing import Any

import torch

from attnplug.errors import ServeError
from attnplug.serve.paged.layer import Far, LayerTraits, ServedLayer, phases_for
from attnplug.serve.paged.pages import Pages
from attnplug.serve.paged.phases import ServedPolicy
from attnplug.serve.paged.rows import Run
from attnplug.serve.paged.state import bytes_of
from attnplug.serve.sglang.options import SGLANG, page_error
from attnplug.serve.sglang.rows import Extend, extend_of

Base: Any = object  # `backend_class` puts SGLang's class behind it
logger = logging.getLogger("sglang.attnplug")
WARM_ROWS = 256  # steps of more rows have the kernels of so many


def backend_class(base: type[Any]) -> type[Any]:
    """attnplug's backend over `base`, SGLang's FlashAttentionBackend."""
    return type("PlugAttnBackend", (PlugAttention, base), {})


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """The model's RadixAttention layers, of which several may share one layer's pages."""
    return [each for each in model.modules() if hasattr(each, "tp_k_head_num")]


class PlugAttention(Base):
    """What attnplug puts in front of SGLang's FlashAttentionBackend."""

    # Prompts' lengths are read on the host.
    supports_full_cuda_graph_chunked_prefix = False

    def __init__(self, runner: Any, server: Any, policy: ServedPolicy):
        super().__init__(runner)
        if self.fa_skip_kv_cache:
            raise SGLANG.error(
                "an embedding model without chunks and radix cache writes no pages; give it "
                "--chunked-prefill-size or leave the radix cache on"
            )
        self.policy, self.longest = policy, runner.model_config.context_len
        self.rows, self.dtype = runner.req_to_token_pool.size, runner.dtype
        chunk = server.chunked_prefill_size or 0
        self.chunk = min(chunk, self.longest) if chunk > 0 else self.longest
        self.attentions = {each.layer_id: each for each in attention_layers(runner.model)}
        if any(isinstance(each.k_scale, float) for each in self.attentions.values()):
            raise SGLANG.error(
                "scales of --quantization-param-path are numbers on the host, which SGLang's "
                "FlashAttention 3 does not take either; drop it, as a checkpoint's own are read"
            )
        self.layers = {index: self._serve(each) for index, each in self.attentions.items()}
        decoding = {i: each for i, each in self.layers.items() if each.phases.decode is not None}
        self.rule = next((each.rule for each in decoding.values()), None)
        self._far: Far | None = None  # of the steps that are computed now
        self._divided = 0  # rows that were divided, or looked at
        self._extend: Extend | None = None  # of the prompts that are computed now
        self._allocate(decoding)

    def _serve(self, layer: Any) -> ServedLayer:
        device = torch.device(self.device)
        softcap = float(layer.logit_cap or 0.0)
        traits = LayerTraits(
            head_dim=layer.head_dim,
            longest=self.longest,
            rows=self.rows,
            device=device,
            softcap=softcap,
            left_dense=self._left_dense(layer),
        )
        phases, why = phases_for(self.policy.of_layer(layer.layer_id), traits)
        return ServedLayer(
            phases,
            scale=layer.scaling,
            softcap=softcap,
            sinks=None,  # a model passes them with each call
            device=device,
            index=layer.layer_id,
            why=why,
        )

    def _left_dense(self, layer: Any) -> str:
        """Why FlashAttention must serve the layer, "" where it need not."""
        window = layer.sliding_window_size
        capped = layer.logit_cap and layer.logit_capping_method != "tanh"
        reasons = {
            "no decoder self-attention": layer.attn_type.value != "decoder",
            "another sequence's keys": layer.is_cross_attention,
            "a sliding window": window is not None and window > -1,
            "attention in chunks": layer.use_irope and self.has_local_attention,
            "values of another width than its keys": layer.v_head_dim != layer.head_dim,
            "a temperature by position": layer.xai_temperature_len > 0,
            "positions inside of attention": layer.pos_encoding_mode != "NONE",
            "a softcap other than tanh's": bool(capped),
        }
        return next((f"the layer has {why}" for why, true in reasons.items() if true), "")

    def _allocate(self, decoding: dict[int, ServedLayer]) -> None:
        """Make what gather keeps beside the pages, and say once for each kind of layer what serves
        it."""
        held = 0
        for index, served in decoding.items():
            assert served.phases.decode is not None and served.state is not None  # it decodes
            error = page_error(served.phases.decode, self.page_size)
            if error is not None:
                raise error
            held += bytes_of(served.state.of(self._pages(self.attentions[index]).k))
        kinds: dict[tuple[Any, str], list[int]] = {}
        for index, served in self.layers.items():
            kinds.setdefault((served.phases, served.why), []).append(index)
        for (phases, why), indices in kinds.items():
            logger.info(
                "attnplug: %d layers: prefill %s, decode %s%s",
                len(indices),
                phases.prefill or "dense",
                phases.decode or "dense",
                f" ({why})" if why else "",
            )
        if held:
            logger.info(
                "attnplug: %.2f GiB are held beside the cache, outside of --mem-fraction-static",
                held / 2**30,
            )

    def warm(self) -> None:
        """Run the methods once on made-up keys on a GPU, so that Triton has compiled their kernels
        before the first request."""
        warmed = set()
        for index, served in self.layers.items():
            layer = self.attentions[index]
            heads = dict(heads=layer.tp_q_head_num, kv_heads=layer.tp_k_head_num)
            pages = self._pages(layer)
            stored = {"fp8": pages.fp8, "scaled": pages.k_scale is not None}
            kind = *heads.values(), layer.head_dim, served.phases, *stored.values()
            if not served.phases.sparse or kind in warmed:
                continue
            warmed.add(kind)
            place = dict(dtype=self.dtype, device=torch.device(self.device))
            shape = dict(head_dim=layer.head_dim, **heads, **place)
            served.warm_prompts(self.chunk, self.longest, **shape)
            rows = min(self.rows, WARM_ROWS)
            served.warm_steps(rows, self.longest, page=self.page_size, **stored, **shape)

    def get_fused_kv_write_buffers(self, layer: Any, forward_batch: Any) -> None:
        """None: keys are written by the pool, or before attention, and noted then."""

    # What SGLang prepares of a batch. Replays of a graph divide rows in the graph.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a batch that runs eagerly, or between the pieces of a breakable graph."""
        super().init_forward_metadata(forward_batch)
        self._forget()
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            self._divide(self.forward_metadata.cache_seqlens_int32)
        elif mode.is_extend_or_draft_extend_or_mixed():
            self._note_rows(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._forget()

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        if forward_batch.forward_mode.is_decode_or_idle():
            self._divide(self.forward_metadata.cache_seqlens_int32)

    def _forget(self) -> None:
        self._far, self._extend, self._divided = None, None, 0

    def _divide(self, lengths: torch.Tensor) -> None:
        """Say which rows of steps are far, on the device. Rows that pad a graph have one key, in a
        page that is nobody's: they are near."""
        self._far, self._divided = None, len(lengths)
        if self.rule is not None and self.rule.reachable(len(lengths), self.longest):
            near, far, chosen = self.rule.divide(lengths)
            self._far = Far(far, chosen, near)

    def _note_rows(self, forward_batch: Any) -> None:
        queries, prefixes = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        extend = extend_of(list(queries), list(prefixes))
        self._extend = extend
        keys = torch.tensor(extend.batch.step_keys, dtype=torch.int64, device="cpu")
        if self.rule is None or not self.rule.far(keys).any():
            return  # it runs eagerly, and may look at lengths on the host
        near, far, chosen = self.rule.divide(
            self.forward_metadata.cache_seqlens_int32[extend.first_step :].contiguous()
        )
        self._far = Far(far, chosen, near)

    # Attention.

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **given: Any,
    ) -> Any:
        served = self.layers.get(layer.layer_id)
        if served is not None and served.phases.decode is not None and _plain(given):
            rows = len(self.forward_metadata.cache_seqlens_int32)
            if self._divided != rows:
                raise ServeError(
                    f"attnplug in SGLang: a step of {rows} rows comes, and {self._divided} were "
                    "prepared; report this"
                )
            if self._far is not None:
                self._write(k, v, layer, forward_batch, save_kv_cache)
                served.sinks = given.get("sinks")
                out = _output(q, layer, forward_batch)
                self._attend_steps(
                    served, layer, q, self._far, slice(0, rows), out, forward_batch.out_cache_loc
                )
                return out.view(len(out), -1)
        made = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **given)
        self._note_keys(served, layer, forward_batch)
        return made

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **given: Any,
    ) -> Any:
        served, extend = self.layers.get(layer.layer_id), self._extend
        if served is not None and extend is not None and served.phases.sparse and _plain(given):
            runs = list(extend.batch.runs(served.serves_prompt))
            far = self._far if served.phases.decode is not None else None
            if far is not None or any(run.sparse for run in runs):
                self._write(k, v, layer, forward_batch, save_kv_cache)
                self._note_keys(served, layer, forward_batch)
                served.sinks = given.get("sinks")
                out = _output(q, layer, forward_batch)
                # Keys that something else has written are read where they are.
                new = (k, v) if save_kv_cache and k is not None else (None, None)
                for run in runs:
                    self._attend_run(run, served, layer, (q, *new), out, forward_batch, given)
                if extend.batch.steps:
                    self._attend_behind(extend, far, served, layer, q, out, forward_batch, given)
                return out.view(len(out), -1)
        made = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **given)
        self._note_keys(served, layer, forward_batch)
        return made

    def _attend_run(self, run: Run, served, layer, new, out, forward_batch, given) -> None:
        """Neighbouring rows of prompts, by momo or by FlashAttention."""
        q, k, v = new
        if not run.sparse:
            first, last = run.rows[0].index, run.rows[-1].index + 1
            part = first, last, run.tokens, run.longest
            self._attend_dense(part, layer, q, out, forward_batch, given)
            return
        heads = layer.tp_q_head_num, layer.head_dim
        if k is not None:
            k, v = (x.view(-1, layer.tp_k_head_num, layer.head_dim) for x in (k, v))
        table = self.forward_metadata.page_table
        pages = self._pages(layer)
        served.attend_prompt(run.rows[0], q.view(-1, *heads), k, v, pages, table, out)

    def _attend_behind(self, extend, far, served, layer, q, out, forward_batch, given) -> None:
        """The steps of a mixed batch, by gather where a row is far."""
        count, first = extend.batch.steps, extend.first_token
        tokens, last = slice(first, first + count), extend.first_step + count
        if far is None:
            part = extend.first_step, last, tokens, 1
            self._attend_dense(part, layer, q, out, forward_batch, given)
        else:
            rows = slice(extend.first_step, last)
            self._attend_steps(served, layer, q[tokens], far, rows, out[tokens], None)

    def _attend_steps(self, served, layer, q, far: Far, rows: slice, out, slots) -> None:
        """gather for all of some rows of one query. Notes the keys at `slots`, if there are any."""
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        table = self.forward_metadata.page_table[rows]
        # With `dense` the method reads near rows itself, in place of what is given.
        served.attend_steps(q, self._pages(layer), table, far, out, slots=slots, dense=_never)

    def _attend_dense(self, part, layer, q, out, forward_batch, given) -> None:
        """FlashAttention for the tokens of some rows, which reads their keys from the pages."""
        first, last, tokens, longest = part
        whole, mine = self.forward_metadata, copy.copy(forward_batch)
        mine.batch_size, mine._attn_output = last - first, out[tokens].flatten(1)
        self.forward_metadata = _rows_of(whole, first, last, tokens, longest)
        try:
            made = super().forward_extend(q[tokens], None, None, layer, mine, False, **given)
        finally:
            self.forward_metadata = whole
        if made.data_ptr() != mine._attn_output.data_ptr():
            out[tokens].copy_(made.view_as(out[tokens]))

    # Pages.

    def _pages(self, layer: Any) -> Pages:
        """Keys and values of a layer's pages, `[pages, Hkv, page, D]`. In fp8 a model without
        scales has None for them."""
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if k.dim() == 3:  # heads inside of a page
            k, v = (x.unflatten(0, (-1, self.page_size)).transpose(1, 2) for x in (k, v))
        pages = Pages(k, v)
        return pages.in_fp8(layer.k_scale, layer.v_scale) if pages.fp8 else pages

    def _write(self, k, v, layer, forward_batch, save_kv_cache: bool) -> None:
        """Write a batch's keys and values to the pages, unless something has done so before."""
        if save_kv_cache and k is not None:
            place = layer, forward_batch.out_cache_loc
            self.token_to_kv_pool.set_kv_buffer(*place, k, v, layer.k_scale, layer.v_scale)

    def _note_keys(self, served: ServedLayer | None, layer: Any, forward_batch: Any) -> None:
        """Note the keys that a batch has written. Those that pad a batch go to slot 0, of a page
        that is nobody's."""
        if served is not None and served.state is not None:
            served.state.update(self._pages(layer).k, forward_batch.out_cache_loc)


def _plain(given: dict[str, Any]) -> bool:
    """Whether a call asks for nothing that only FlashAttention knows; sinks are known here."""
    known = {"sinks"}
    return all(name in known or value is None or value is False for name, value in given.items())


def _never() -> None:
    raise AssertionError("gather reads near rows itself")


def _output(q: torch.Tensor, layer: Any, forward_batch: Any) -> torch.Tensor:
    """Where attention goes `[tokens, Hq, D]`: where a breakable graph wants it, or a new tensor."""
    made = getattr(forward_batch, "_attn_output", None)
    shape = -1, layer.tp_q_head_num, layer.head_dim
    return (q.new_empty(q.shape) if made is None else made).view(shape)


def _rows_of(metadata: Any, first: int, last: int, tokens: slice, longest: int) -> Any:
    """FlashAttention's metadata of rows `first` to `last - 1` alone, whose tokens are at `tokens`.
    Without the schedule that was made of the batch: it is that of all rows."""
    keys = metadata.cu_seqlens_k[first : last + 1]
    return dataclasses.replace(
        metadata,
        cache_seqlens_int32=metadata.cache_seqlens_int32[first:last],
        max_seq_len_q=longest,
        cu_seqlens_q=metadata.cu_seqlens_q[first : last + 1] - tokens.start,
        cu_seqlens_k=keys - keys[0],
        page_table=metadata.page_table[first:last],
        scheduler_metadata=None,
    )
