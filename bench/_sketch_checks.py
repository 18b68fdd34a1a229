"""The kernels of `sketch` against their CPU references, on odd shapes (`sketch_ops.py`)."""

from collections.abc import Callable
from typing import Any

import torch
from _op_rows import inputs, near

from attnplug.ops.sketch import attend_picks as attend
from attnplug.ops.sketch import encode_keys as encode
from attnplug.ops.sketch import merge_sketch as merge
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_query as prepare
from attnplug.ops.sketch import scan_sketch as scan
from attnplug.ops.sketch import sketch_decode as decode
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.state import empty_codes

# dtype, head dimension, group, bytes, tokens, padded, masked, softcap
CHECKS = [
    (torch.bfloat16, 128, 7, 24, 2501, True, False, 0.0),
    (torch.float16, 64, 1, 24, 1500, False, False, 0.0),
    (torch.float32, 128, 4, 32, 1999, True, True, 0.0),
    (torch.float16, 256, 3, 32, 1777, False, False, 20.0),
    (torch.bfloat16, 96, 8, 24, 2048, True, True, 5.0),
    (torch.float32, 80, 16, 16, 1203, True, False, 0.0),
    (torch.float32, 256, 4, 24, 1300, False, False, 0.0),
    (torch.bfloat16, 128, 8, 16, 5003, True, False, 0.0),
    (torch.float16, 128, 5, 32, 4321, True, False, 0.0),
]
PLANS = {"hopper": scan.PLAN, "plain": scan.PLAN._replace(hopper=False)}


def check(dtype, width, group, size, tokens, padded, masked, cap) -> dict[str, Any]:
    """Each op on the GPU against the CPU's, on the CPU's inputs of that op."""
    queries, k, v, lengths, start, mask = inputs(dtype, width, group, tokens, padded, masked)
    rows = {"lengths": lengths, "start": start}
    basis = fit_basis(k, v, queries, size=size, **rows, key_mask=mask)
    q, scale, top_k = queries[:, :, -1:], width**-0.5, 200
    found, room = [], 0.03 if dtype != torch.float32 else 1e-4

    def there(x: Any) -> Any:
        return x.cuda() if isinstance(x, torch.Tensor) else x

    def both(op: Callable[..., Any], *args: Any, **options: Any):
        moved = {name: there(x) for name, x in options.items()}
        return op(*args, **options), op(*map(there, args), **moved)

    codes, codes_there = empty_codes(k, size), empty_codes(k.cuda(), size)
    encode.encode_keys(k, v, basis.encoder, *codes, **rows, key_mask=mask)
    moved = {name: there(x) for name, x in rows.items()}
    encode.encode_keys(
        k.cuda(), v.cuda(), basis.encoder.cuda(), *codes_there, **moved, key_mask=there(mask)
    )
    apart = sum(int((a != b.cpu()).sum()) for a, b in zip(codes[:2], codes_there[:2], strict=True))
    assert apart <= 1e-3 * codes.fine.numel(), f"encode: {apart} bytes differ"
    assert all(torch.equal(a, b.cpu()) for a, b in zip(codes[2:], codes_there[2:], strict=True))
    found.append(f"bytes {apart}")
    options = {"scale": scale, "softcap": cap, **rows, "key_mask": mask}
    fixed, fixed_there = both(prepare.prepare_query, q, k, v, basis.queries, **options)
    found.append(near("projected", fixed_there[0], fixed[0], 1e-3))
    found.append(near("fixed_lse", fixed_there[2], fixed[2], room))
    asked = (fixed[0], fixed[2], *codes, top_k, 3, rows["lengths"], start, mask, cap)
    scanned = shares, total, sums, norm, middle = scan._scan_sketch(*asked)
    written = torch.zeros_like(shares, dtype=torch.bool)  # what is no candidate may hold anything
    for b, length in enumerate(lengths.tolist()):
        low = 0 if start is None else int(start[b])
        written[b, :, low + 128 : low + 128 * encode.near_block(length, low)] = True
    for name, plan in PLANS.items():
        moved_asked = list(map(there, asked))
        scanned_there = scan._allocate(*moved_asked)
        scan.launch_scan_sketch(*moved_asked, *scanned_there, plan=plan)
        # Hopper's kernel rounds a norm by up to a unit of the weights (`hopper_scan`).
        rank = 2 * codes.fine.shape[3] + 4 * codes.coarse.shape[3]
        unit = 0.0 if name == "plain" else float(fixed[0][..., :rank].abs().max()) / 127
        compared = compare_scan(scanned, scanned_there, written, rows, top_k, 1e-3 + unit)
        found.append(f"{name} {compared}")
    picked, picked_there = both(pick.pick_tokens, shares, total, middle, top_k=top_k, **rows)
    assert torch.equal(picked_there[0].cpu(), picked[0]), "picks differ"
    found.append(near("cut", picked_there[1], picked[1], 1e-3))
    own, own_there = both(
        attend.attend_picks,
        q,
        k,
        v,
        fixed[0],
        *codes[:2],
        *picked,
        norm,
        scale=scale,
        pieces=2,
        softcap=cap,
    )
    found.append(near("pick_lse", own_there[1], own[1], room))
    found.append(
        near(
            "pick_sums",
            own_there[2] / (1 + own[2].abs().cuda()),
            own[2] / (1 + own[2].abs()),
            max(room, 2e-3),
        )
    )
    for tail in merge.TAILS:
        merged, merged_there = both(
            merge.merge_sketch,
            q,
            *fixed,
            *own,
            sums,
            norm,
            picked[1],
            basis.v_mean,
            tail=tail,
            softcap=cap,
        )
        found.append(near(f"out {tail}", merged_there[0], merged[0].double(), room))
    chain = (q, k, v, *basis)
    out, lse = decode.sketch_decode(*chain, *codes, **options, top_k=top_k)
    for name in ("cold", "warm"):  # codes made in the step, and there before
        own_codes = empty_codes(k.cuda(), size) if name == "cold" else codes_there
        out_there, lse_there = decode.sketch_decode(
            *map(there, chain),
            *own_codes,
            **{n: there(x) for n, x in options.items()},
            top_k=top_k,
        )
        apart = float((out_there.cpu().double() - out.double()).norm() / out.double().norm())
        assert apart < 0.05, f"chain, {name}: {apart:.3g} apart"
        found.append(near(f"lse {name}", lse_there, lse.double(), 0.05))
        assert torch.equal(own_codes[3].cpu(), codes[3]), f"progress, {name}"
    return {"result": "ok: " + ", ".join(found)}


def compare_scan(wanted, found, written, rows, top_k, norm_room) -> str:
    """A scan's outputs on the GPU against the CPU's, and its histogram against its own shares."""
    shares, _, sums, norm, middle = wanted
    own = [x.cpu() for x in found]
    parts = [
        near("shares", own[0][written], shares[written], 0.02),
        near("sums", own[2] / (1 + sums.abs()), sums / (1 + sums.abs()), 2e-3),
        near("norm", own[3], norm, norm_room),
        near("middle", own[4], middle, 1e-3),
    ]
    own[0][~written] = -torch.inf
    compare_counts(own[0], own[1], own[4], rows, top_k)
    return ", ".join(parts)


def compare_counts(shares, total, middle, rows, top_k) -> None:
    """Raise AssertionError unless `total` has all shares that can be picked; all on the CPU."""
    lengths, start = scan.rows_on_cpu(shares[..., None], rows["lengths"], rows["start"])
    counted = torch.zeros_like(total)
    wide = shares.float().numpy()
    scan.count_shares(wide, lengths.numpy(), start.numpy(), middle.numpy(), counted.numpy())
    reached = counted[..., 1:].flip(-1).cumsum(-1).flip(-1)
    needed = torch.cat([torch.ones_like(reached[..., :1]), (reached < top_k).int()], -1)
    first = reached.ge(top_k).sum(-1, keepdim=True)  # the bin of the k-th: 0 if none is
    needed.scatter_(-1, first, 1)
    apart = ((counted - total) * needed).abs().sum()
    assert apart == 0, f"counts: {int(apart)} apart"
