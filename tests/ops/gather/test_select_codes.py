"""select_blocks by INT8 codes and by bands: keys that are not finite, and channels far off zero."""

import itertools

import pytest
import torch
from cases import random
from gather_cases import empty
from select_cases import codes, edges, hold, said, select


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scoring", ["bounds", "band"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_key_is_selected_first_by_codes(device_path, scoring, bad):
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    k[0, 1, 7 * 16 + 3, 9] = bad
    options = {"top_k": 2, "scoring": scoring}
    index = select(device_path, q, k, codes(k, 16, scoring), **options)
    assert index[0, 1, 0, 0] == 7
    other = k[:, :1].expand(1, 2, 300, 64)
    alone = select(device_path, q, other, codes(other, 16, scoring), **options)
    assert torch.equal(index[0, 0], alone[0, 0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_a_band_lies_about_the_mean_however_far_off(device_path, int8, masked):
    """Channels that are far off zero, as some models' keys are, keep their deviations; codes keep
    means to half a step, and one width."""
    q, k = random(0, 2, 4, 1, 64), random(1, 2, 2, 300, 64) + 100 * random(2, 2, 2, 1, 64)
    start = torch.tensor([0, 21])
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(3)) < 0.8 if masked else None
    rows = {"start": start, "key_mask": mask, "scoring": "band", "top_k": 3}
    state = codes(k, 16, "band") if int8 else empty(k, 16)
    index = select(device_path, q, k, state, **rows)
    words = said(state[0], 19) if int8 else state[0].double()
    hold(index, q, k, words=words, **rows)
    for b, h, j in itertools.product(range(2), range(2), range(1, 15)):
        at = torch.arange(16) + int(start[b]) + 16 * j
        keys = k[b, h, at if mask is None else at[mask[b, at]]].double()
        wanted, found = torch.stack(edges(keys, "band")), words[b, h, j]
        if int8:
            assert (found.mean(0) - wanted.mean(0)).abs().max() < 0.1
            found, wanted = (found[0] - found[1]).mean(), (wanted[0] - wanted[1]).mean()
        assert (found - wanted).abs().max() < (0.2 if int8 else 1e-3)


def test_codes_bound_whatever_the_offset(device_path):
    """A needle below the noise of channels that are far off zero, as some models' keys are."""
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    q = q[:, :1].expand(1, 4, 1, 64).contiguous()
    k[0, :, 101] = 3 * q[0, 0, 0]
    k += 100 * random(2, 1, 2, 1, 64)
    assert (select(device_path, q, k, codes(k, 16), top_k=1) == 101 // 16).all()
