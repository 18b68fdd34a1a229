"""A row's length, start and mask, as launchers and CPU references take them, and as kernels read
them."""

import pytest
import torch
import triton
import triton.language as tl

from attnplug.ops.common import base_two, mask_bytes, row_step, rows_of, rows_on_cpu, steps_of
from attnplug.ops.common.rows import blocks_done, note_progress, row_span


def test_rows_share_a_tensor_of_one_element():
    assert row_step(None) == 0
    assert row_step(torch.tensor([5])) == 0
    assert row_step(torch.tensor([5, 6])) == 1
    assert row_step(torch.tensor([5, 0, 6, 0])[::2]) == 2
    assert row_step(torch.tensor([5]).expand(3)) == 0


def test_rows_lie_within_the_buffer():
    k = torch.zeros(3, 1, 10, 64)
    lengths, start = rows_on_cpu(k, None, None)
    assert lengths.tolist() == [10, 10, 10] and start.tolist() == [0, 0, 0]
    lengths, start = rows_on_cpu(k, torch.tensor([4, 11, 7]).int(), torch.tensor([-2]))
    assert lengths.tolist() == [4, 10, 7] and start.tolist() == [0, 0, 0]
    assert lengths.dtype == start.dtype == torch.int64
    assert lengths.is_contiguous() and start.is_contiguous()


def test_a_mask_is_bytes_with_contiguous_rows():
    assert mask_bytes(None) is None
    mask = torch.tensor([[True, False, True], [False, True, True]])
    own = mask_bytes(mask)
    assert own is not None and own.dtype == torch.uint8 and own.data_ptr() == mask.data_ptr()
    turned = mask_bytes(mask.T.contiguous().T)
    assert turned is not None and turned.stride(1) == 1 and torch.equal(turned.bool(), mask)


@triton.jit
def _spans(rows, out, STEPS: tl.constexpr, NEW: tl.constexpr, BYPASS_L1: tl.constexpr):
    b = tl.program_id(0)
    length, low = row_span(rows, b, STEPS, NEW, BYPASS_L1)
    tl.store(out + b * 2, length)
    tl.store(out + b * 2 + 1, low)


@pytest.mark.parametrize("bypass", [0, 1])
@pytest.mark.parametrize("new", [0, 1])
def test_a_kernel_reads_the_rows_that_the_reference_does(device, new, bypass):
    """A length past the buffer counts as the buffer's, and with a new token as one more."""
    lengths, start = (
        torch.tensor([4, 11, 7], device=device),
        torch.tensor([-2, 3, 9], device=device),
    )
    for rows in ((lengths, start), (lengths[:1], None), (None, start[::2].expand(2))):
        out = torch.full((3, 2), -7, dtype=torch.int32, device=device)
        batch = 3 if rows[1] is None or len(rows[1]) == 3 else 2
        given = rows_of(10, *rows)
        _spans[(batch,)](given, out, STEPS=steps_of(*rows), NEW=new, BYPASS_L1=bypass)
        k = torch.zeros(batch, 1, 10, 64)
        wanted = rows_on_cpu(k, *(x if x is None else x.cpu() for x in rows))
        # Without `lengths` the whole buffer is valid, and there is no token to come.
        more = 0 if rows[0] is None else new
        assert out[:batch, 0].tolist() == (wanted[0] + more).tolist()
        assert out[:batch, 1].tolist() == wanted[1].tolist()


@pytest.mark.parametrize("new", [0, 1])
def test_no_length_leads_out_of_the_buffer(device, new):
    """int64 too, whose lower half may be a place in it."""
    wanted = {-(2**63): 0, -(2**32) + 3: 0, -1: 0, 0: 0 + new, 9: 9 + new, 10: 10 + new}
    wanted |= {x: 10 + new for x in (11, 2**31 - 1, 2**31 + 5, 2**32 + 3, 2**63 - 1)}
    lengths = torch.tensor(list(wanted), device=device)
    out = torch.full((len(lengths), 2), -7, dtype=torch.int32, device=device)
    rows, steps = rows_of(10, lengths, lengths), steps_of(lengths, lengths)
    _spans[(len(lengths),)](rows, out, STEPS=steps, NEW=new, BYPASS_L1=0)
    assert out[:, 0].tolist() == list(wanted.values())
    k = torch.zeros(len(lengths), 1, 10, 64)
    both = rows_on_cpu(k, lengths.cpu(), lengths.cpu())
    assert both[0].tolist() == both[1].tolist() == out[:, 1].tolist()


@triton.jit
def _progress(progress, out, low, until):
    tl.store(out, blocks_done(progress, 0, low))
    note_progress(progress, 0, low, until)


@pytest.mark.parametrize(
    "before, low, until, done, after",
    [
        ((5, 2), 2, 7, 5, (7, 2)),
        ((5, 2), 2, 3, 5, (5, 2)),  # never fewer
        ((5, 2), 0, 3, 0, (3, 0)),  # another start: summaries of other blocks
    ],
)
def test_progress_counts_from_one_start(device, before, low, until, done, after):
    progress = torch.tensor([before], dtype=torch.int32, device=device)
    out = torch.full((1,), -7, dtype=torch.int32, device=device)
    _progress[(1,)](progress, out, low, until)
    assert out.tolist() == [done] and progress.tolist() == [list(after)]


def test_base_two_scales_logits_to_units_of_log_2():
    scale, cap = base_two(0.25, 0.0)
    assert 2 ** (scale * 3) == pytest.approx(torch.tensor(0.75).exp().item()) and cap == 0
    scale, cap = base_two(0.25, 5.0)
    logit = 5.0 * torch.tanh(torch.tensor(0.25 * 3 / 5.0))
    capped = cap * (1 - 2 / (2 ** (scale * 3) + 1))
    assert 2**capped == pytest.approx(logit.exp().item(), rel=1e-6)
