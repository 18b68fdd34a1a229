"""The ops. Each is a torch.library op with a Triton kernel (CUDA), a numba reference (CPU) and a
fake (tracing), in a file of its own name."""

from attnplug.ops.certified.certified_attention import CertifiedOutput, certified_attention
from attnplug.ops.certified.quantize_kv import QuantizedKV, quantize_kv
from attnplug.ops.certified.scratch import Scratch
from attnplug.ops.dense.dense_decode import dense_decode
from attnplug.ops.gather.block_bounds import block_bounds
from attnplug.ops.gather.block_maxima import block_maxima
from attnplug.ops.gather.gather_attention import gather_attention
from attnplug.ops.gather.gather_decode import gather_decode
from attnplug.ops.gather.page_bounds import page_bounds
from attnplug.ops.gather.select_blocks import select_blocks
from attnplug.ops.gather.tiered_decode import ResidentBlocks, tiered_decode
from attnplug.ops.gvr.gather_tokens_attention import gather_tokens_attention
from attnplug.ops.gvr.index_topk import index_topk
from attnplug.ops.gvr.page_codes import page_codes
from attnplug.ops.gvr.pool_keys import pool_keys
from attnplug.ops.gvr.score_tokens import score_tokens
from attnplug.ops.gvr.top_tokens import top_tokens
from attnplug.ops.gvr.topk import topk
from attnplug.ops.latent.latent_attention import latent_attention
from attnplug.ops.momo.block_sparse_attention import block_sparse_attention
from attnplug.ops.momo.delta_correct import delta_correct
from attnplug.ops.momo.measure_blocks import measure_blocks
from attnplug.ops.momo.merge_block_rows import merge_block_rows
from attnplug.ops.momo.query_sparse_attention import query_sparse_attention
from attnplug.ops.sketch.encode_keys import encode_keys
from attnplug.ops.sketch.encode_pages import encode_pages
from attnplug.ops.sketch.host_decode import FixedPart, sketch_host_decode
from attnplug.ops.sketch.sketch_decode import sketch_decode
from attnplug.ops.sketch.sketch_pages import sketch_pages
from attnplug.ops.stream.stream_edges import stream_edges
from attnplug.ops.stream.stream_mask import stream_mask

__all__ = [
    "CertifiedOutput",
    "FixedPart",
    "QuantizedKV",
    "ResidentBlocks",
    "Scratch",
    "block_bounds",
    "block_maxima",
    "block_sparse_attention",
    "certified_attention",
    "delta_correct",
    "dense_decode",
    "encode_keys",
    "encode_pages",
    "gather_attention",
    "gather_decode",
    "gather_tokens_attention",
    "index_topk",
    "latent_attention",
    "measure_blocks",
    "merge_block_rows",
    "page_bounds",
    "page_codes",
    "pool_keys",
    "quantize_kv",
    "query_sparse_attention",
    "score_tokens",
    "select_blocks",
    "sketch_decode",
    "sketch_host_decode",
    "sketch_pages",
    "stream_edges",
    "stream_mask",
    "tiered_decode",
    "top_tokens",
    "topk",
]
