"""The ops: each a torch.library op with a Triton kernel (CUDA), a numba reference (CPU) and a fake
(tracing), in a file of its own name."""

from attnplug.ops._certified_scratch import Scratch
from attnplug.ops.block_bounds import block_bounds
from attnplug.ops.block_sparse_attention import block_sparse_attention
from attnplug.ops.certified_attention import CertifiedOutput, certified_attention
from attnplug.ops.delta_correct import delta_correct
from attnplug.ops.dense_decode import dense_decode
from attnplug.ops.gather_attention import gather_attention
from attnplug.ops.gather_decode import gather_decode
from attnplug.ops.gather_tokens_attention import gather_tokens_attention
from attnplug.ops.measure_blocks import measure_blocks
from attnplug.ops.merge_block_rows import merge_block_rows
from attnplug.ops.quantize_kv import QuantizedKV, quantize_kv
from attnplug.ops.query_sparse_attention import query_sparse_attention
from attnplug.ops.score_tokens import score_tokens
from attnplug.ops.select_blocks import select_blocks
from attnplug.ops.stream_edges import stream_edges
from attnplug.ops.stream_mask import stream_mask
from attnplug.ops.tiered_decode import Near, tiered_decode
from attnplug.ops.topk import topk

__all__ = [
    "CertifiedOutput",
    "Near",
    "QuantizedKV",
    "Scratch",
    "block_bounds",
    "block_sparse_attention",
    "certified_attention",
    "delta_correct",
    "dense_decode",
    "gather_attention",
    "gather_decode",
    "gather_tokens_attention",
    "measure_blocks",
    "merge_block_rows",
    "quantize_kv",
    "query_sparse_attention",
    "score_tokens",
    "select_blocks",
    "stream_edges",
    "stream_mask",
    "tiered_decode",
    "topk",
]
