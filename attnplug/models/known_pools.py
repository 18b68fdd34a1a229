"""GLM-5.3's indexer as transformers has it: which pools of tokens its `forward` picks, what the key
of a pool is, and the mask that the picks become. A model's own are compared instruction for
instruction (see known_code.py), and the end of its attention's forward statement for statement. An
indexer that picks otherwise is left to the model.
"""

import functools
from typing import Any

import torch
from torch.nn import functional as F

from attnplug.models.known_code import same_code
from attnplug.models.names import CACHE
from attnplug.models.own_code import own_code
from attnplug.models.rewritten import body_of

END = f"""if {CACHE} is not None:
    k_pass, k_rot = {CACHE}.update(k_pass, k_rot, self.layer_idx, kwargs=kwargs)
key_states, value_states = self.expand_kv(k_pass, k_rot)
if self.indexer is not None:
    topk_indices = self.indexer(hidden_states=hidden_states, q_resid=q_resid, \
attention_mask=attention_mask, {CACHE}={CACHE})
else:
    if prev_topk_indices is None:
        raise ValueError('Shared DSA layers require top-k indices from a previous full indexer \
layer.')
    topk_indices = prev_topk_indices
attention_mask = self.build_attention_mask_from_topk(topk_indices=topk_indices, \
query_states=query_states, kv_length=key_states.shape[2])
attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(\
self.config._attn_implementation, eager_attention_forward)
attn_output, attn_weights = attention_interface(self, query_states, key_states, value_states, \
attention_mask, dropout=0.0 if not self.training else self.attention_dropout, \
scaling=self.scaling, **kwargs)
attn_output = attn_output.reshape(batch_size, seq_length, -1).contiguous()
attn_output = self.o_proj(attn_output)
return (attn_output, attn_weights, topk_indices if self.next_skip_topk else None)"""


PICKS = "get_visible_tokens", "get_pooled_states", "append_visible_tail"  # what `forward` calls


def picks_as_known(kind: type[torch.nn.Module]) -> bool:
    """Whether an indexer's class picks pools as below."""
    known = forward, get_visible_tokens, get_pooled_states, append_visible_tail
    return all(same_code(getattr(kind, each.__name__, None), each) for each in known)


def reads_as_known(kind: type[torch.nn.Module]) -> bool:
    """Whether an attention class makes a mask of the picks as below, and nothing else."""
    made = getattr(kind, "build_attention_mask_from_topk", None)
    return same_code(made, build_attention_mask_from_topk) and _ends_as_known(
        own_code(kind.forward)
    )


@functools.cache
def _ends_as_known(forward: Any) -> bool:
    found = body_of(forward)
    return found is not None and "\n".join(found[1]).endswith(f"\n{END}")


def forward(self: Any, hidden_states: Any, q_resid: Any, attention_mask: Any, cache: Any) -> Any:
    """As in transformers, where it has a docstring."""
    batch_size, seq_len = hidden_states.shape[:2]
    hidden_shape = (batch_size, seq_len, -1, self.head_dim)
    q = self.wq_b(q_resid).view(hidden_shape)
    k = self.k_norm(self.wk(hidden_states)).view(hidden_shape).squeeze(2)
    gate_scores = F.linear(hidden_states, self.index_kpool_compress_gate)
    valid_channel = attention_mask.to(k.dtype)[..., None]
    packed_states = torch.cat([k, gate_scores, valid_channel], dim=-1)
    kv_len = seq_len
    current_length = seq_len
    if cache is not None:
        cache_layer = cache.layers[self.layer_idx]
        packed_states = cache.update_indexer(packed_states, self.layer_idx)
        kv_len = cache_layer.keys.shape[-2]
        current_length = cache_layer.get_seq_length()
    valid_keys = packed_states[..., -1].bool()
    visible_tokens = self.get_visible_tokens(
        valid_keys=valid_keys, q_length=seq_len, current_length=current_length
    )
    pool_keys, pool_indices, pool_valid = self.get_pooled_states(packed_states=packed_states)
    scores = torch.matmul(q.float(), pool_keys.transpose(-1, -2).float().unsqueeze(1))
    scores = F.relu(scores * self.softmax_scale)
    weights = self.weights_proj(
        hidden_states.to(self.weights_proj.weight.dtype)
    ).float() * self.n_heads ** (-0.5)
    index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
    pool_end = pool_indices[..., -1].clamp(0, kv_len - 1)
    pool_visible = visible_tokens.gather(
        dim=-1, index=pool_end[:, None, :].expand(batch_size, seq_len, -1)
    )
    valid_candidates = pool_visible & pool_valid[:, None]
    index_scores = index_scores.masked_fill(~valid_candidates, torch.finfo(index_scores.dtype).min)
    select_k = min(self.index_topk // self.index_kpool, index_scores.shape[-1])
    selected = index_scores.topk(select_k, dim=-1).indices
    batch_idx = torch.arange(batch_size, device=hidden_states.device)[:, None, None]
    selected_valid = valid_candidates.gather(-1, selected)
    selected_indices = pool_indices[batch_idx, selected]
    topk_indices = selected_indices.flatten(-2)
    topk_indices = topk_indices.masked_fill(
        ~selected_valid[..., None].expand_as(selected_indices).flatten(-2), -1
    )
    output_width = self.index_topk
    if self.index_kpool_always_select_tail:
        topk_indices = self.append_visible_tail(topk_indices, visible_tokens, valid_keys)
        output_width += self.index_kpool - 1
    topk_indices = F.pad(topk_indices, (0, output_width - topk_indices.shape[-1]), value=-1)
    topk_indices = topk_indices[..., :output_width]
    topk_indices = topk_indices.masked_fill(~attention_mask[..., None], -1)
    return topk_indices.to(torch.int32)


def get_visible_tokens(self: Any, valid_keys: Any, q_length: Any, current_length: Any) -> Any:
    """As in transformers, where it has a docstring."""
    device = valid_keys.device
    kv_positions = torch.arange(valid_keys.shape[-1], device=device)
    q_positions = current_length - q_length + torch.arange(q_length, device=device)
    causal = kv_positions[None, None, :] <= q_positions[None, :, None]
    return causal & valid_keys[:, None, :]


def get_pooled_states(self: Any, packed_states: Any) -> Any:
    """As in transformers, where it has a docstring."""
    keys, gate_scores, valid_keys = torch.split(
        packed_states, [self.head_dim, self.head_dim, 1], dim=-1
    )
    valid_keys = valid_keys.bool().squeeze(-1)
    batch_size, seq_len = keys.shape[:2]
    number_of_pools = (seq_len + self.index_kpool - 1) // self.index_kpool
    device = keys.device
    first_key = torch.where(
        valid_keys.any(-1),
        valid_keys.long().argmax(-1),
        torch.full((batch_size,), seq_len, dtype=torch.long, device=device),
    )
    pool_offsets = torch.arange(number_of_pools * self.index_kpool, device=device)
    pool_offsets = pool_offsets.view(1, number_of_pools, self.index_kpool)
    pool_indices = first_key[:, None, None] + pool_offsets
    batch_idx = torch.arange(batch_size, device=device)[:, None, None]
    safe_indices = pool_indices.clamp(0, seq_len - 1)
    grouped_keys = keys[batch_idx, safe_indices]
    grouped_gate_scores = gate_scores[batch_idx, safe_indices]
    grouped_valid_keys = valid_keys[batch_idx, safe_indices]
    grouped_valid_keys = grouped_valid_keys & (pool_indices < seq_len)
    pool_valid = grouped_valid_keys.all(-1)
    pool_indices = pool_indices.masked_fill(~grouped_valid_keys, -1)
    logits = grouped_gate_scores.float() + self.index_kpool_compress_ape.float()[None, None]
    logits = logits.masked_fill(~grouped_valid_keys[..., None], float("-inf"))
    probabilities = torch.nan_to_num(logits.softmax(dim=2)).to(grouped_keys.dtype)
    pool_keys = (probabilities * grouped_keys).sum(dim=2)
    keep = pool_valid.any(0)
    return (pool_keys[:, keep], pool_indices[:, keep], pool_valid[:, keep])


def append_visible_tail(self: Any, topk_indices: Any, token_visible: Any, key_valid: Any) -> Any:
    """As in transformers, where it has a docstring."""
    if (max_tail_width := (self.index_kpool - 1)) == 0:
        return topk_indices
    batch_size, _, kv_length = token_visible.shape
    device = token_visible.device
    first_key = torch.where(
        key_valid.any(-1),
        key_valid.long().argmax(-1),
        torch.full((batch_size,), kv_length, dtype=torch.long, device=device),
    )
    visible_count = token_visible.long().sum(-1)
    tail_count = visible_count.remainder(self.index_kpool)
    tail_offsets = torch.arange(max_tail_width, device=device)
    tail_start = first_key[:, None] + visible_count - tail_count
    tail_indices = tail_start[..., None] + tail_offsets
    tail_valid = (tail_offsets[None, None, :] < tail_count[..., None]) & tail_indices.lt(kv_length)
    kv_idx = tail_indices.clamp(0, kv_length - 1)
    tail_visible = token_visible.gather(dim=-1, index=kv_idx)
    tail_indices = tail_indices.masked_fill(~(tail_valid & tail_visible), -1)
    return torch.cat([topk_indices, tail_indices], dim=-1)


def build_attention_mask_from_topk(
    self: Any, topk_indices: Any, query_states: Any, kv_length: Any
) -> Any:
    """As in transformers, where it has a docstring."""
    topk_valid = topk_indices.ge(0) & topk_indices.lt(kv_length)
    safe_indices = topk_indices.clamp(0, kv_length - 1)
    selected_counts = torch.zeros(
        topk_indices.shape[0],
        topk_indices.shape[1],
        kv_length,
        dtype=torch.int32,
        device=topk_indices.device,
    )
    selected_counts.scatter_add_(-1, safe_indices, topk_valid.to(torch.int32))
    mask = selected_counts.ne(0).unsqueeze(1)
    if self.config._attn_implementation == "sdpa":
        return mask
    min_dtype = torch.finfo(query_states.dtype).min
    mask = torch.where(
        mask, torch.full((), 0.0, device=query_states.device, dtype=query_states.dtype), min_dtype
    )
    return mask
