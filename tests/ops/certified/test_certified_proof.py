"""The constants of certified's proof: who compiles them in, and what they must have room for."""

import numpy as np
import pytest
import torch

from attnplug.ops.certified import proof, quantize_kv, records, reference


@pytest.mark.parametrize("module", [reference, quantize_kv], ids=lambda module: module.__name__)
def test_files_that_compile_constants_in_change_with_them(module):
    """numba's cache looks at the compiled function's own file. If this fails, write
    `proof.digest()` down as the module's PROOF: then nothing stale is left in the cache."""
    assert proof.digest() == module.PROOF


def test_kernels_have_the_same_constants():
    shared = [name for name in vars(proof) if name.isupper() and hasattr(records, name)]
    assert len(shared) > 30
    for name in shared:
        assert getattr(records, name).value == getattr(proof, name), name


def fields(prefix):
    """The numbers of a record's fields, and how many it says to have."""
    names = [name for name in vars(records) if name.startswith(prefix)]
    numbers = {name: getattr(records, name).value for name in names}
    return numbers.pop(f"{prefix}FIELDS"), sorted(numbers.values())


@pytest.mark.parametrize(
    "prefix", ["COUNT_", "LIST_", "RANK_", "HEAD_", "REST_", "EXACT_", "FLAG_", "BOUND_"]
)
def test_fields_of_a_record_are_apart(prefix):
    count, numbers = fields(prefix)
    assert numbers == list(range(count))


def test_larger_records_have_room():
    names = [name for name in vars(records) if name.startswith(("LEFT_", "ALL_"))]
    numbers = sorted(getattr(records, name).value for name in names if name != "LEFT_FIELDS")
    assert numbers == list(range(records.LEFT_FIELDS.value))
    ranks = records.RANKS.value * records.RANK_FIELDS.value
    assert records.PROMOTED_FIELDS.value == records.PROMOTED_RANKS.value + ranks


def bf16(x):
    return torch.from_numpy(x).bfloat16().float().numpy()


def test_delta_has_room_for_a_query_in_16_bits():
    """`prepare`'s |q|, rounded, raised and rounded again, is short by 2^-8 at most, and is so."""
    q = np.float32(2.0) ** np.random.default_rng(0).uniform(-1, 1, 100_000).astype(np.float32)
    q = np.append(q, np.float32(1 + 2.0**-8 - 2.0**-20))  # rounded to a power of two
    raised = bf16(bf16(q) * np.float32(proof.QUERY_CARE))
    short = (raised.astype(np.float64) / q).min()
    assert 1 - 2.0**-8 <= short < 1 - 2.0**-9
    assert proof.DELTA_CARE / short * (1 + 2.0**-12) < proof.DELTA_CARE_16_BIT


def test_slack_has_room_for_float32():
    """e^D - 1 and 1 - e^-D from a float32 exp2 that is off by 2^-22, as the kernels have them."""
    delta = np.float32(2.0) ** np.arange(-60, 5, 0.01, dtype=np.float32)
    for sign in (1, -1):
        exact = np.exp2(sign * delta.astype(np.float64))
        for off in (1 - 2.0**-22, 1 + 2.0**-22):
            rough = (exact * off).astype(np.float32)
            found = (rough - 1 if sign == 1 else 1 - rough) + np.float32(proof.EXP2_SLACK)
            assert (found * proof.CARE >= np.abs(np.expm1(np.log(2) * sign * delta))).all()
