"""MiniMax-M3's indexer as transformers has it: what its `forward` picks, and what the mask that
`build_block_mask` makes of the picks lets a query see. Both are compared instruction for
instruction (see known_code.py) with a model's own. An indexer that picks otherwise, or whose picks
mean something else, is left to the model.
"""

from typing import Any

import torch
from torch.nn import functional as F

from attnplug.models.known_code import apply_rotary_pos_emb


def forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    cache: Any,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    batch, q_len, _ = hidden_states.shape
    idx_q = self.q_proj(hidden_states).view(batch, q_len, -1, self.head_dim)
    idx_q = self.q_norm(idx_q).transpose(1, 2)
    idx_k = self.k_proj(hidden_states).view(batch, q_len, 1, self.head_dim)
    idx_k = self.k_norm(idx_k).transpose(1, 2)
    cos, sin = position_embeddings
    idx_q, idx_k = apply_rotary_pos_emb(
        idx_q, idx_k, cos[..., : self.head_dim], sin[..., : self.head_dim]
    )

    if cache is not None:
        idx_k = cache.layers[self.layer_idx].update_index(idx_k)

    k_len = idx_k.shape[2]
    num_key_blocks = -(-k_len // self.block_size)
    pad = num_key_blocks * self.block_size - k_len

    scores = torch.matmul(idx_q.float(), idx_k.float().transpose(-1, -2))
    k_positions = torch.arange(k_len, device=idx_q.device)
    token_future = k_positions[None, None, None, :] > position_ids[:, None, :, None]
    scores = scores.masked_fill(token_future, float("-inf"))
    if pad:
        scores = F.pad(scores, (0, pad), value=float("-inf"))
    scores = scores.view(batch, self.num_heads, q_len, num_key_blocks, self.block_size)
    block_scores = scores.amax(dim=-1)

    q_block = position_ids // self.block_size

    if self.local_blocks > 0:
        local = torch.arange(self.local_blocks, device=idx_q.device)
        local_idx = (q_block[..., None] - local.view(1, 1, -1)).clamp(min=0)
        local_idx = local_idx.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        block_scores.scatter_(-1, local_idx, float("inf"))

    topk = min(self.topk_blocks, num_key_blocks)
    topk_scores, topk_indices = block_scores.topk(topk, dim=-1)
    return topk_indices.masked_fill(topk_scores == float("-inf"), -1)


def build_block_mask(
    self: Any,
    block_indices: torch.Tensor,
    attention_mask: torch.Tensor | None,
    key_length: int,
    dtype: torch.dtype,
    device: torch.device,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """As in transformers, where it has a docstring."""
    batch, n_idx_heads, q_len, _ = block_indices.shape
    num_key_blocks = -(-key_length // self.block_size)

    safe = block_indices.masked_fill(block_indices < 0, num_key_blocks)
    bias = block_indices.new_full(
        (batch, n_idx_heads, q_len, num_key_blocks + 1), float("-inf"), dtype=dtype
    )
    bias.scatter_(-1, safe, 0.0)
    bias = bias[..., :num_key_blocks]

    block_keep = (bias == 0.0).repeat_interleave(self.block_size, dim=-1)[..., :key_length]
    block_keep = block_keep.repeat_interleave(self.config.num_attention_heads // n_idx_heads, dim=1)

    if attention_mask is not None:
        padding_mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        keep = block_keep & padding_mask
    else:
        k_positions = torch.arange(key_length, device=device)
        token_future = k_positions[None, None, None, :] > position_ids[:, None, :, None]
        keep = block_keep & ~token_future
    min_dtype = torch.finfo(dtype).min
    return torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill(~keep, min_dtype)
