"""The ops: each a torch.library op with a Triton kernel (CUDA), a numba reference (CPU) and a fake
(tracing), in a file of its own name."""

from attnplug.ops.block_sparse_attention import block_sparse_attention
from attnplug.ops.delta_correct import delta_correct
from attnplug.ops.dense_decode import dense_decode
from attnplug.ops.merge_block_rows import merge_block_rows
from attnplug.ops.query_sparse_attention import query_sparse_attention

__all__ = [
    "block_sparse_attention",
    "delta_correct",
    "dense_decode",
    "merge_block_rows",
    "query_sparse_attention",
]
