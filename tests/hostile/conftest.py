"""Every policy with a budget that covers what these tests ask of it: it must give stock tokens."""

import pytest

EXACT = {
    "dense": "dense",
    "momo": "momo(gamma=8, block=16, query_block=16, top_k=8, tail=8, min_tokens=0)",
    "gather": "gather(k=8, block=16, sink=1, local=2, min_tokens=0)",
    "gather-host": "gather(k=8, block=16, sink=1, local=2, min_tokens=0, kv='host', resident=9)",
    "gvr": "gvr(k=512, sink=2, window=8, min_tokens=0)",
    "sketch": "sketch(min_tokens=0)",
    "certified": "certified(block=16, coverage=1.0, k_min=64, v_tol=0.0, min_tokens=0)",
    "stream": "prefill=stream(top_k=8, block=16, query_block=16)",
}


@pytest.fixture(params=list(EXACT.values()), ids=list(EXACT))
def exact(request) -> str:
    return request.param
