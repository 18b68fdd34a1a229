"""Qwen4-Exp's indexer as transformers has it: what its `forward` picks, and the norm of its
compressed keys. They are compared instruction for instruction (see known_code.py) with a model's
own. An indexer that picks otherwise is left to the model.
"""

import math
from typing import Any

import torch

from attnplug.models.known_code import rotate_half


def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.group_size is not None:
        x = x.reshape(*x.shape[:-1], -1, self.group_size)
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return out.flatten(-2) if self.group_size is not None else out


def apply_rotary_pos_emb(
    q: Any, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1
) -> Any:
    """As there, which has a docstring."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]

    q_rope, q_nope = q[..., :rotary_dim], q[..., rotary_dim:]
    q_rope = (q_rope * cos) + (rotate_half(q_rope) * sin)
    q_rotated = torch.cat([q_rope, q_nope], dim=-1)

    if k is not None:
        k_rope, k_nope = k[..., :rotary_dim], k[..., rotary_dim:]
        k_rope = (k_rope * cos) + (rotate_half(k_rope) * sin)
        k_rotated = torch.cat([k_rope, k_nope], dim=-1)
        return q_rotated, k_rotated
    else:
        return q_rotated


def forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    batch_size, seq_length, _ = hidden_states.shape
    hidden_shape = (batch_size, seq_length, -1, self.index_head_dim)
    full_cos, full_sin = position_embeddings
    current_cos, current_sin = full_cos[:, -seq_length:, :], full_sin[:, -seq_length:, :]

    qk = self.index_qk_proj(hidden_states)
    q, token_k = torch.split(
        qk,
        [self.index_n_heads * self.index_head_dim, self.index_kv_heads * self.index_head_dim],
        dim=-1,
    )
    q, raw_keys = q.reshape(*hidden_shape), token_k.reshape(*hidden_shape).squeeze(2)
    q = self.q_layernorm(q)
    q = apply_rotary_pos_emb(q, cos=current_cos, sin=current_sin, unsqueeze_dim=2)

    if cache is not None:
        raw_keys = cache.update_indexer(raw_keys, self.layer_idx)

    visible_token_indices = (
        attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    )

    selected_token_indices = torch.full(
        (batch_size, seq_length, self.token_budget + self.compress_ratio - 1),
        -1,
        dtype=torch.int32,
        device=hidden_states.device,
    )
    for batch_idx in range(batch_size):
        for query_idx in range(seq_length):
            local_visible_indices = torch.nonzero(
                visible_token_indices[batch_idx, 0, query_idx], as_tuple=False
            ).flatten()
            num_complete_blocks = local_visible_indices.shape[-1] // self.compress_ratio
            if num_complete_blocks > 0:
                block_token_indices = local_visible_indices[
                    : num_complete_blocks * self.compress_ratio
                ].view(num_complete_blocks, self.compress_ratio)

                key_groups = raw_keys[batch_idx].index_select(0, block_token_indices.flatten())
                key_groups = key_groups.view(*block_token_indices.shape, self.index_head_dim)
                pooled_keys = key_groups.float().mean(dim=1).to(raw_keys.dtype)
                pooled_keys = self.k_layernorm(pooled_keys)
                group_starts = block_token_indices[:, 0]
                block_key_states = apply_rotary_pos_emb(
                    pooled_keys.unsqueeze(1),
                    cos=full_cos[batch_idx].index_select(0, group_starts),
                    sin=full_sin[batch_idx].index_select(0, group_starts),
                ).squeeze(1)

                scores = torch.matmul(
                    q[batch_idx, query_idx].float(), block_key_states.float().transpose(-1, -2)
                ).transpose(-1, -2)
                scores = torch.relu(scores).sum(dim=-1) / math.sqrt(self.index_head_dim)

                selected_block_indices = scores.topk(
                    min(self.block_topk, num_complete_blocks), dim=0
                ).indices
                selected_tokens = block_token_indices.index_select(
                    0, selected_block_indices
                ).flatten()
            else:
                selected_tokens = torch.tensor([], device=hidden_states.device)
            tail = local_visible_indices[num_complete_blocks * self.compress_ratio :]
            selected_tokens = torch.cat([selected_tokens, tail]).to(torch.int32)
            selected_token_indices[batch_idx, query_idx, : selected_tokens.numel()] = (
                selected_tokens
            )

    kv_length = attention_mask.shape[-1]
    selected_token_mask = torch.zeros(
        (*selected_token_indices.shape[:-1], kv_length + 1),
        device=attention_mask.device,
        dtype=torch.bool,
    )
    scatter_indices = torch.where(selected_token_indices >= 0, selected_token_indices, kv_length)
    selected_token_mask = selected_token_mask.scatter(-1, scatter_indices, True)[
        ..., :kv_length
    ].unsqueeze(1)

    return selected_token_mask
