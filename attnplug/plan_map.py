"""A map of the bill: contexts across, batches up, and what a sparse method gains in each."""

import math
from pathlib import Path

import numpy as np
import torch

from attnplug import files
from attnplug.extras import require
from attnplug.plan import CONTEXTS, Bill, Shape, Sparse

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def gains(shape: Shape, bill: Bill, policy: Sparse) -> np.ndarray:
    """Speed-ups `[BATCHES,CONTEXTS]` of what attnplug would run: 1 where that is dense, NaN where
    the cache does not fit or is longer than what the model can read."""
    cuda = torch.device("cuda")
    return np.array(
        [
            [
                math.nan
                if not (bill.fits(shape, n, b) and shape.reads(n))
                else 1.0
                if not policy.serves(b, n, cuda)
                else bill.speedup(shape, n, b, policy)
                for n in CONTEXTS
            ]
            for b in BATCHES
        ]
    )


def draw_map(shape: Shape, bill: Bill, policy: Sparse, path: Path) -> None:
    """Context across, batch up, the speed-up as colour and number; grey where it runs dense, empty
    where the cache does not fit, or is longer than what the model reads. Raises
    MissingPackageError."""
    require("plot", "the map of attnplug plan")
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    found, cuda = gains(shape, bill, policy), torch.device("cuda")
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    colors = colormaps["viridis"].with_extremes(bad="#ffffff")
    dense = np.array([[not policy.serves(b, n, cuda) for n in CONTEXTS] for b in BATCHES])
    shown = np.where(dense, np.nan, np.log2(found))
    axes.imshow(shown, origin="lower", cmap=colors, aspect="auto")
    for (row, column), gain in np.ndenumerate(found):
        if np.isnan(gain):
            continue
        if dense[row, column]:
            square = Rectangle((column - 0.5, row - 0.5), 1, 1, color="#d4d4d4")
            axes.add_patch(square)
        bright = not dense[row, column] and np.log2(gain) < 0.6 * np.nanmax(shown)
        color = "#ff9e80" if gain < 1 else "w" if bright else "k"
        label = "dense" if dense[row, column] else f"{gain:.2f}"
        axes.text(column, row, label, ha="center", va="center", color=color)
    names = [f"{n // 1024}K" if n < 1 << 20 else f"{n >> 20}M" for n in CONTEXTS]
    axes.set_xticks(range(len(CONTEXTS)), names)
    axes.set_yticks(range(len(BATCHES)), [str(b) for b in BATCHES])
    axes.set_xlabel("tokens of context; empty: the cache does not fit")
    axes.set_ylabel("sequences")
    axes.set_title(f"predicted decode speed-up of {policy} over dense")
    files.write_figure(path, figure)
