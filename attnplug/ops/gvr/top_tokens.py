"""The best cached tokens of a decode step: `score_tokens`, and `topk` of the scores, as one op.

    picks[b, h] = the k tokens n < length[b] that come first by (score[b, h, n] descending,
                  n ascending)

with `score` of score_tokens.py; ties, NaN and -0.0 as in topk.py. The kernels are those of the two
ops: the host calls one op for them.
Source: as in topk.py.
"""

import torch

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.gvr import score_tokens as scoring
from attnplug.ops.gvr import topk as ranking

NAME = "top_tokens"


def top_tokens(
    q: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    k: int,
    *,
    sink: int = 0,
    window: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    stats: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The k cached tokens of each KV head with the largest scores, for one decode step or for each
    of a few queries.

    Args:
        q: `[B,Hq,T,D]`, float32, float16 or bfloat16; the last T tokens of each row, up to 16.
        codes: int8 `[B,Hkv,S,D]`, Hkv dividing Hq, S up to 4,194,304; see `quantize_keys`.
        steps: float32 `[B,Hkv,S]`, each key's quantization scale: the value of code 1.
        k: 1 to 4096, also above S.
        sink: the first so many real tokens of each row score -inf.
        window: the last `window` tokens up to a query score -inf, its own included, and so do
            the tokens behind it.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens. None: all S. Others are not read, and
            not picked.
        start: int32 or int64 `[1]` or `[B]`, first real token of a left-padded row. None: 0.
        key_mask: bool `[B,S]`, False where a token must not be seen.
        stats: also return the path and the cost of each row, as `topk` does.

    Returns:
        indices `[R,k]` int32 and values `[R,k]` float32 of the R = B * Hkv * T rows. Their order is
        unspecified, but the same in every run with the same arguments on the same device. Where
        fewer than k tokens may be seen, others of the length are picked, whose value is -inf. Where
        k exceeds a row's length, -1 and -inf at the end. With `stats` a third tensor `[R,3]` int32.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: q requires grad.
    """
    refuse_gradients(NAME, q)
    indices, values, how = _top_tokens(q, codes, steps, k, sink, window, lengths, start, key_mask)
    return (indices, values, how) if stats else (indices, values)


def _allocate(q, codes, steps, k, sink, window, lengths, start, key_mask):
    options = sink, window, lengths, start, key_mask
    shape = scoring.score_shape(NAME, q, codes, steps, *options, None, scoring.MOST_QUERIES)
    rows, size = shape[0] * q.shape[2], shape[1]
    require(1 <= k <= ranking.MAX_K, NAME, f"k is {k}, needs 1 to {ranking.MAX_K}")
    require(
        size <= ranking.MAX_SCORES,
        NAME,
        f"codes has {size} tokens a row, at most {ranking.MAX_SCORES} are allowed",
    )
    return (
        q.new_empty((rows, k), dtype=torch.int32),
        q.new_empty((rows, k), dtype=torch.float32),
        q.new_empty((rows, 3), dtype=torch.int32),
    )


# --- CPU: the specification ------------------------------------------------------------------


def _cpu(q, codes, steps, k, sink, window, lengths, start, key_mask, indices, values, how):
    options = {"sink": sink, "window": window, "start": start, "key_mask": key_mask}
    scores = scoring.score_tokens(q, codes, steps, lengths=lengths, **options)
    rows = scoring.score_lengths(lengths, codes.shape[1] * q.shape[2])
    found = ranking.topk(scores, k, lengths=rows, stats=True)
    for output, result in zip((indices, values, how), found, strict=True):
        output.copy_(result)


# --- CUDA ------------------------------------------------------------------------------------


def launch_top_tokens(
    q, codes, steps, k, sink, window, lengths, start, key_mask, indices, values, how
):
    """Run the kernels; tensors as in `top_tokens`, on a GPU or in Triton's interpreter."""
    heads = codes.shape[1] * q.shape[2]
    rows, size = len(q) * heads, codes.shape[2]
    if rows == 0:
        return
    scores = q.new_empty((rows, size), dtype=torch.float32)
    scoring.launch_score_tokens(q, codes, steps, sink, window, lengths, start, key_mask, scores)
    own = scoring.score_lengths(lengths, heads)
    ranking.launch_topk(scores, k, None, own, False, indices, values, how)


_top_tokens = define_op(
    f"{NAME}(Tensor q, Tensor codes, Tensor steps, int k, int sink, int window, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask) -> (Tensor, Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_top_tokens,
    repeats=True,
)
