"""Every policy against every promise of the contract that one policy can be held to.

Policies that are approximations get, as `exact`, the setting whose budget covers everything.
"""

import pytest

from attnplug.testing import check_policy

# policy, and the same method with a budget large enough to be exact
POLICIES = {
    "dense": ("dense", "dense"),
    "momo": (
        "momo(gamma=8, block=16, query_block=16, top_k=2, exact_k=1, min_tokens=0)",
        "momo(gamma=8, block=16, query_block=16, top_k=8, exact_k=8, min_tokens=0)",
    ),
    "gather": (
        "gather(k=1, block=16, local=2, min_tokens=0)",
        "gather(k=8, block=16, local=2, min_tokens=0)",
    ),
    "gather in host memory": (
        "gather(k=1, block=16, local=2, min_tokens=0, kv='host', resident=2)",
        "gather(k=8, block=16, local=2, min_tokens=0, kv='host', resident=9)",
    ),
    "gvr": (
        "gvr(k=4, sink=2, window=8, min_tokens=0)",
        "gvr(k=512, sink=2, window=8, min_tokens=0)",
    ),
    "certified": (
        "certified(block=16, min_tokens=0)",
        "certified(block=16, coverage=1.0, k_min=64, v_tol=0.0, min_tokens=0)",
    ),
    "momo+certified": (
        "momo(gamma=8, block=16, query_block=16, top_k=2, exact_k=1, min_tokens=0)"
        "+certified(block=16, min_tokens=0)",
        "momo(gamma=8, block=16, query_block=16, top_k=8, exact_k=8, min_tokens=0)"
        "+certified(block=16, coverage=1.0, k_min=64, v_tol=0.0, min_tokens=0)",
    ),
    "momo+gather": (
        "momo(gamma=8, block=16, query_block=16, top_k=2, exact_k=1, min_tokens=0)"
        "+gather(k=1, block=16, local=2, min_tokens=0)",
        "momo(gamma=8, block=16, query_block=16, top_k=8, exact_k=8, min_tokens=0)"
        "+gather(k=8, block=16, local=2, min_tokens=0)",
    ),
    "momo+gather+stream": (
        "momo(gamma=8, block=16, query_block=16, top_k=2, exact_k=1, min_tokens=0)"
        "+gather(k=1, block=16, local=2, min_tokens=0)+stream(top_k=2, block=16)",
        "momo(gamma=8, block=16, query_block=16, top_k=8, exact_k=8, min_tokens=0)"
        "+gather(k=8, block=16, local=2, min_tokens=0)+stream(top_k=2, block=16)",
    ),
    "prefill=stream": (
        "prefill=stream(top_k=2, block=16, query_block=16)",
        "prefill=stream(top_k=8, block=16, query_block=16)",
    ),
}
GROUPS = {
    "exactness": (1, 3, 8),
    "rows": (2,),
    "compile": (4,),
    "generate": (5,),
    "housekeeping": (6, 7),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", POLICIES)
def test_policy_keeps_its_promises(name, group, device):
    policy, exact = POLICIES[name]
    report = check_policy(policy, exact=exact, promises=GROUPS[group], device=device)
    print(report)
