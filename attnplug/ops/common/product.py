"""The matrix product of the numba references: several of them run in numba's own threads, where
BLAS must not be called (OpenBLAS warns that it may hang there, and serialises)."""

from attnplug.ops.common.numba_cache import njit


@njit(fastmath={"contract"})
def add_product(a, b, c):
    """c += a b, float32: a `[M, K]`, b `[K, N]`, c `[M, N]`, each with unit stride in its last
    dimension. The order of the sums depends on the shapes alone. Two rows by four columns of `a`
    at a time keep a vector loop over N busy: half of BLAS's speed on one core."""
    rows, inner = a.shape
    paired, whole = rows // 2 * 2, inner // 4 * 4
    for r in range(0, paired, 2):
        c0, c1 = c[r], c[r + 1]
        for i in range(0, whole, 4):
            x0, x1, x2, x3 = a[r, i], a[r, i + 1], a[r, i + 2], a[r, i + 3]
            y0, y1, y2, y3 = a[r + 1, i], a[r + 1, i + 1], a[r + 1, i + 2], a[r + 1, i + 3]
            b0, b1, b2, b3 = b[i], b[i + 1], b[i + 2], b[i + 3]
            for j in range(c0.shape[0]):
                p, q, s, t = b0[j], b1[j], b2[j], b3[j]
                c0[j] += (x0 * p + x1 * q) + (x2 * s + x3 * t)
                c1[j] += (y0 * p + y1 * q) + (y2 * s + y3 * t)
    for r in range(paired, rows):
        for i in range(whole):
            _add_row(a[r, i], b[i], c[r])
    for r in range(rows):
        for i in range(whole, inner):
            _add_row(a[r, i], b[i], c[r])


@njit(fastmath={"contract"})
def _add_row(x, b, c):
    for j in range(c.shape[0]):
        c[j] += x * b[j]
