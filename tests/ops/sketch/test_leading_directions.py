"""The subspace iteration of sketch's basis beside LAPACK: what it keeps of the variance, and that
no input ends its Cholesky factors."""

import pytest
import torch

from attnplug.ops.sketch.basis import fit_basis, leading_directions

D, RANK = 128, 64


def covariance(spectrum: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))[0]
    return (turn * spectrum) @ turn.mT


def block() -> torch.Tensor:
    """Half of the axes vary more, each alone; together the others are the leading direction."""
    return torch.block_diag(torch.eye(64, dtype=torch.float64), torch.full((64, 64), 0.9).double())


MATRICES = {
    "slowly falling": covariance(0.95 ** torch.arange(D, dtype=torch.float64)),
    "steeply": covariance(torch.logspace(0, -14, D, dtype=torch.float64)),
    "twenty directions": covariance((torch.arange(D) < 20).double()),
    "all alike": torch.eye(D, dtype=torch.float64),
    "an axis alone": torch.diag((torch.arange(D) == 7).double()),
    "block": block(),
    "tiny": covariance(1e-30 * 0.9 ** torch.arange(D, dtype=torch.float64)),
    "rounded": covariance(0.9 ** torch.arange(D, dtype=torch.float64)).float().bfloat16().double(),
}


@pytest.mark.parametrize("name", MATRICES)
def test_the_leading_directions_are_lapacks(name, device):
    m = MATRICES[name]
    values, vectors = (x.cpu() for x in leading_directions(m[None, None].to(device), RANK))
    assert values.shape == (1, 1, RANK) and vectors.shape == (1, 1, D, RANK)
    values, vectors = values[0, 0], vectors[0, 0]
    eye = torch.eye(RANK, dtype=torch.float64)
    assert torch.allclose(vectors.mT @ vectors, eye, atol=1e-10)
    best = torch.linalg.eigvalsh(m).flip(-1).clamp(min=0)
    for rank in (RANK // 2, RANK):  # the coordinates of 4 bits, and all
        lost = best[:rank].sum() - values[:rank].sum()
        assert -1e-9 <= lost / best.sum() <= 2e-3, rank
    assert torch.allclose(values, (vectors.mT @ m @ vectors).diagonal(), atol=1e-12 * best[0])


def test_no_direction_is_found_where_nothing_varies():
    values, vectors = leading_directions(torch.zeros(2, D, D, dtype=torch.float64), RANK)
    assert (values == 0).all() and vectors.isfinite().all()


def test_nearly_uncorrelated_where_eigenvalues_differ():
    m = MATRICES["slowly falling"]
    _, x = leading_directions(m, RANK)
    inside = x.mT @ m @ x
    deviation = inside.diagonal().sqrt()
    off = inside / deviation[:, None] / deviation - torch.eye(RANK, dtype=torch.float64)
    assert off.abs().max() < 0.1


@pytest.mark.parametrize("keys", ["none", "one token", "all alike", "long"])
def test_a_basis_of_odd_keys_is_finite(keys, device):
    torch.manual_seed(2)
    k, v = torch.randn(2, 1, 2, 300, 64)
    q, lengths = torch.randn(1, 4, 8, 64), torch.tensor([300])
    if keys == "none":
        lengths = torch.tensor([0])
    elif keys == "one token":
        lengths = torch.tensor([1])
    elif keys == "all alike":
        k[:] = k[:, :, :1]
    else:
        k *= 1e6
    k, v, q, lengths = (x.to(device) for x in (k, v, q, lengths))
    for part in fit_basis(k, v, q, size=16, lengths=lengths):
        assert part.isfinite().all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing():
    k, v = torch.randn(2, 2, 3, 5000, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 6, 512, 128, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(2, 5000, dtype=torch.bool, device="cuda")
    rows = {"lengths": mask.sum(1), "start": mask.sum(1) * 0, "key_mask": mask}
    fit_basis(k, v, q, **rows)  # what a library sets up at its first call
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        fit_basis(k, v, q, **rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpus_basis_is_a_cpus(device):
    """As good in the scores that it estimates: what it has for a key is not the same."""
    torch.manual_seed(3)
    turn = torch.linalg.qr(torch.randn(2, 64, 64))[0]
    k = torch.randn(1, 2, 4000, 64) * 0.93 ** torch.arange(64) @ turn
    q, v = torch.randn(1, 4, 256, 64), torch.randn(1, 2, 4000, 64)
    errors = []
    for place in ("cpu", device):
        encoder, queries, _ = (
            x.cpu() for x in fit_basis(*(x.to(place) for x in (k, v, q)), size=16)
        )
        codes = (k @ encoder[..., :-1, :] + encoder[..., -1:, :] + 0.5).floor().clamp(min=0)
        codes = torch.minimum(codes, torch.tensor([15.0] * 16 + [3.0] * 32))
        asked = q.unflatten(1, (2, 2)).flatten(2, 3)
        found = (asked @ queries[..., :48]) @ codes.mT + asked @ queries[..., 48:49]
        scores = asked @ k.mT
        errors.append((found - scores).square().mean() / scores.var())
    assert errors[0] < 0.05 and abs(errors[1] / errors[0] - 1) < 0.02
