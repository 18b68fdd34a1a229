"""A few queries at once over a long cache: candidates of speculative decoding, heads that choose
several tokens, a short turn of a conversation.

A method that decodes serves them as it serves rows of a batch: each query is a step of its own over
the tokens up to it, and picks for itself. The price grows with the queries, where dense attention
reads the cache once for all of them.
"""

from attnplug.call import AttentionCall
from attnplug.policies.crossover import NEVER, DenseBelow
from attnplug.policies.dense import MAX_DECODE_QUERIES, known_below

# By method and by the most queries of a call: the length in tokens from which on the method serves
# such calls by default over a cache on a GPU. Measured by bench/few_queries.py; empty so far.
MEASURED: dict[str, dict[int, int]] = {"gather": {}, "gvr": {}, "sketch": {}}


def is_few(call: AttentionCall) -> bool:
    """Whether a call brings a few tokens to a cache, known from shapes, and no prompt that generate
    is at: 2 to 16."""
    queries = call.q.shape[2]
    if call.lengths is None or not known_below(queries, MAX_DECODE_QUERIES + 1):
        return False
    return not known_below(queries, 2) and not getattr(call.state, "steps_are_prepared", False)


def asks_for_few(method: DenseBelow, call: AttentionCall) -> bool:
    """Whether a call is of a few queries that the method is to serve: where `min_tokens` asks for
    it, over a cache with that many tokens for each query, else where rows were measured to pay."""
    if not is_few(call):
        return False
    queries, size = call.q.shape[2], call.k.shape[2]
    if method.min_tokens is not None:
        return method.serves(len(call.q), size // queries, call.q.device)
    known = [least for most, least in MEASURED[method.name].items() if queries <= most]
    return call.q.is_cuda and bool(size >= min(known, default=NEVER))
