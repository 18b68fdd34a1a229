"""The numba references' matrix product against numpy."""

import numpy as np
import pytest

from attnplug.ops.common.product import add_product


@pytest.mark.parametrize("rows, inner, columns", [(1, 1, 1), (2, 4, 8), (3, 7, 5), (48, 66, 33)])
def test_it_adds_the_product(rows, inner, columns):
    random = np.random.default_rng(0)
    a, b, c = (
        random.standard_normal(shape, dtype=np.float32)
        for shape in ((rows, inner), (inner, columns), (rows, columns))
    )
    wanted = c.astype(np.float64) + a.astype(np.float64) @ b
    add_product(a, b, c)
    assert np.abs(c - wanted).max() < 1e-4


def test_nan_and_inf_reach_only_their_row_or_column():
    a, b, c = (np.ones((4, 4), np.float32) for _ in range(3))
    a[1, 2], b[3, 0] = np.nan, np.inf
    add_product(a, b, c)
    assert np.isnan(c[1]).all()
    assert (c[[0, 2, 3], 0] == np.inf).all() and (c[[0, 2, 3], 1:] == 5).all()
