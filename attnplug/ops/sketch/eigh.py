"""Eigenvalues of many small matrices on the CPU, a matrix a thread.

LAPACK, because solvers on a GPU take the matrices of a batch one after the other, and the host
waits likewise. torch takes them one after the other, too, each with all threads, for which a matrix
of 128 rows is little work.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch


def eigh_side_by_side(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.linalg.eigh of symmetric matrices `[..., n, n]` on the CPU: ascending eigenvalues
    `[..., n]`, and eigenvectors `[..., n, n]` in columns."""
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    if len(flat) < 2 or torch.get_num_threads() < 2:
        return torch.linalg.eigh(matrices)
    found = list(_solvers(torch.get_num_threads()).map(torch.linalg.eigh, flat))
    values, vectors = (torch.stack([pair[i] for pair in found]) for i in (0, 1))
    return values.reshape(matrices.shape[:-1]), vectors.reshape(matrices.shape)


@functools.cache
def _solvers(threads: int) -> ThreadPoolExecutor:
    """So many threads, each of which computes alone."""
    pool, begun = ThreadPoolExecutor(threads, "attnplug-eigh"), threading.Barrier(threads)

    def be_alone() -> None:
        torch.set_num_threads(1)
        begun.wait()

    for each in [pool.submit(be_alone) for _ in range(threads)]:
        each.result()
    torch.set_num_threads(threads)  # what torch gives to threads that begin later, too
    return pool
