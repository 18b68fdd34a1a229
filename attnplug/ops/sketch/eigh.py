"""Eigenvalues of many small matrices on the CPU, a matrix a thread.

LAPACK, because solvers on a GPU take the matrices of a batch one after the other, and the host
waits likewise. torch takes them one after the other, too, each with all threads, for which a matrix
of 128 rows is little work.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import torch


def eigh_side_by_side(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.linalg.eigh of symmetric matrices `[..., n, n]` on the CPU: ascending eigenvalues
    `[..., n]`, and eigenvectors `[..., n, n]` in columns."""
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    if len(flat) < 2 or torch.get_num_threads() < 2:
        return torch.linalg.eigh(matrices)
    pool = _solvers(torch.get_num_threads())
    try:
        jobs = [pool.submit(torch.linalg.eigh, each) for each in flat]
    except RuntimeError:  # the interpreter is ending: no pool takes a job, and others still compute
        return torch.linalg.eigh(matrices)
    found = [job.result() for job in jobs]
    values, vectors = (torch.stack([pair[i] for pair in found]) for i in (0, 1))
    return values.reshape(matrices.shape[:-1]), vectors.reshape(matrices.shape)


@functools.cache
def _solvers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "attnplug-eigh")


if hasattr(os, "register_at_fork"):  # a child has none of these threads
    os.register_at_fork(after_in_child=_solvers.cache_clear)
