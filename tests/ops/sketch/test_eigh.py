"""Many small eigenproblems, a matrix a thread: what torch.linalg.eigh gives, and nobody else's
threads compute with fewer cores afterwards."""

import threading

import pytest
import torch

from attnplug.ops.sketch import eigh
from attnplug.ops.sketch.eigh import eigh_side_by_side


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def covariances(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape, 2 * shape[-1], dtype=torch.float64)
    return x @ x.mT / shape[-1]


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 1, 32), (5, 16), (16,)], ids=str)
def test_it_is_eigh(threads, shape):
    torch.manual_seed(0)
    matrices = covariances(*shape)
    values, vectors = eigh_side_by_side(matrices)
    wanted, _ = torch.linalg.eigh(matrices)
    assert torch.allclose(values, wanted, atol=1e-12) and vectors.shape == matrices.shape
    again = (vectors * values[..., None, :]) @ vectors.mT
    assert torch.allclose(again, matrices, atol=1e-11)
    assert torch.get_num_threads() == threads


def test_threads_that_begin_later_have_all_cores(threads):
    eigh._solvers.cache_clear()
    eigh_side_by_side(covariances(4, 8))
    found = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [threads]


def test_an_ending_interpreter_takes_no_jobs(threads):
    eigh._solvers.cache_clear()
    eigh._solvers(threads).shutdown()  # as the interpreter does
    matrices = covariances(3, 8)
    assert torch.allclose(eigh_side_by_side(matrices)[0], torch.linalg.eigh(matrices)[0])
    eigh._solvers.cache_clear()


def test_what_lapack_refuses_is_refused(threads):
    with pytest.raises(torch.linalg.LinAlgError):
        eigh_side_by_side(torch.full((2, 4, 4), torch.nan, dtype=torch.float64))
