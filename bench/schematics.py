"""Draws one schematic picture a method: docs/img/how-NAME.svg.

    python bench/schematics.py    # writes all of them; needs nothing but Python

All pictures share one language. Indigo is read exactly, pale indigo is read at a low precision,
amber measures and decides, grey is not read. Scores are invented; what they choose in a picture
follows from them as in the method. The first line of a function below is its picture's heading,
the rest is the description that a screen reader gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from _schematic_panel import DECIDES, EXACT, HATCH, MEASURED, QUIET, ROUGH, UNREAD, WHITE, Picture


def scores(count: int, seed: int, peaks: Sequence[int]) -> list[float]:
    """Invented scores from 0.1 to 1: low, but high at the peaks."""
    low = [0.12 + 0.38 * ((i * i * 31 + i * 17 + seed) % 97) / 97 for i in range(count)]
    return [0.6 + 0.8 * low[i] if i in peaks else low[i] for i in range(count)]


def best(values: Sequence[float], k: int, first: int, end: int) -> list[int]:
    """The k largest values from first to end, best first, ties to the lower index."""
    return sorted(range(first, end), key=lambda i: (-values[i], i))[:k]


def momo(p: Picture) -> None:
    """prefill: some queries measure, all queries read what they chose

    A triangle of query blocks by key blocks. Every 16th query is a thin line over all keys. Each
    query block reads the first key block, its own place and the key blocks that its lines chose.
    The last queries read all keys.
    """
    x, y, width, height, last = 80, 62, 19, 20, 7
    chosen = {2: {2}, 3: {2, 4}, 4: {2, 5}, 5: {5, 8}, 6: {2, 9}}
    for row in range(last + 1):
        top, own = y + row * height, x + 2 * row * width
        reads = [row == last or j in {0, *chosen.get(row, ())} for j in range(2 * row)]
        for j, read in enumerate(reads):
            p.box(x + j * width, top, width, height, EXACT if read else UNREAD)
        p.shape((own, top), (own, top + height), (own + 2 * width, top + height), fill=EXACT)
        for share in (0.3, 0.8) if row < last else ():
            level, end = top + share * height, own + 2 * width * share
            p.line((x, level), (end, level), color=MEASURED, width=2)
    p.text(x, y - 6, "keys →", QUIET)
    p.text(x - 8, y + 13, "queries\n↓", QUIET, "end")
    p.text(x - 8, y + last * height + 14, "last", QUIET, "end")
    p.arrow((218, y + 12), (140, y + 12))
    p.text(224, y + 16, "own place", QUIET)
    p.text(410, 76, "1\n2\n3\n4", DECIDES, bold=True, step=44)
    p.text(428, 76, "Every 16th query scores all key\nblocks (amber lines).")
    p.text(428, 120, "The lines of a query block choose\nits k key blocks.")
    p.text(428, 164, "All its queries read these, the\nfirst block and their own place.")
    p.text(428, 208, "The last queries read everything.")
    p.legend(MEASURED, "measures all keys, decides", EXACT, "read exactly", UNREAD, "not read")


def gather(p: Picture) -> None:
    """decode: summaries of key blocks choose which blocks are read

    A strip of key blocks. Each block between the first and the last ones has a summary, whose
    score is a bar. The blocks of the highest bars are read exactly, as are the first and the last
    blocks. The others are not read.
    """
    x, step, count, sink, local = 108, 24.5, 24, 2, 4
    far, end = x + (count - local) * step, x + count * step - 2
    values = scores(count, 5, (6, 7, 12, 16))
    picks = best(values, 4, sink, count - local)
    for i in range(sink, count - local):
        p.box(x + i * step + 5, 124 - 58 * values[i], step - 12, 58 * values[i], MEASURED)
    p.line((x, 124), (end, 124), width=1)
    for i in picks:
        middle = x + (i + 0.5) * step - 1
        p.arrow((middle, 128), (middle, 150), color=DECIDES)
    read = {*picks, *range(sink), *range(count - local, count)}
    p.strip(x, 153, step, 40, [EXACT if i in read else UNREAD for i in range(count)])
    p.text(24, 99, "scores of\nsummaries")
    p.text(24, 169, "keys and\nvalues")
    p.text(far + 6, 99, "the query\nscores all", DECIDES)
    p.bracket(x, x + sink * step - 2, 204, "first")
    p.text((x + end) / 2, 219, "the k best blocks, anew at each step", QUIET, "middle")
    p.bracket(far, end, 204, "last")
    p.legend(
        MEASURED, "block summary: 1 byte a channel, decides",
        EXACT, "read exactly", UNREAD, "not read",
    )  # fmt: skip


def tokens(p: Picture, values: Sequence[float], k: int, first: int, last: int) -> set[int]:
    """What gvr and sketch share: the scores of the tokens between the first and the last ones,
    the k-th best score, and which tokens are read."""
    x, step, count, base = 132, 9.4, len(values), 112
    picks = best(values, k, first, count - last)
    for i in range(first, count - last):
        p.box(x + i * step, base - 54 * values[i], step - 1, 54 * values[i], MEASURED)
    level = base - 54 * values[picks[-1]]
    p.line((x, level), (x + count * step, level), color=DECIDES, dash="5 3")
    p.text(24, level + 5, "k-th best score", DECIDES)
    for i in picks:
        middle = x + (i + 0.5) * step - 0.5
        p.arrow((middle, 143), (middle, 160), color=DECIDES)
    p.text(24, 106, "scores")
    return {*picks, *range(first), *range(count - last, count)}


def gvr(p: Picture) -> None:
    """decode: a scan of INT8 keys finds the exact k best tokens

    A strip of tokens. All keys are scanned as INT8 codes, which gives each token a score. A
    threshold is guessed, verified by counting and refined, until it gives exactly the k best
    tokens. These are read exactly, as are the first and the last tokens. No other is read.
    """
    x, step, count, first, last = 132, 9.4, 60, 4, 6
    read = tokens(p, scores(count, 11, (8, 14, 15, 27, 33, 41, 42, 49)), 8, first, last)
    p.strip(x, 118, step, 22, [ROUGH] * count)
    p.strip(x, 163, step, 34, [EXACT if i in read else UNREAD for i in range(count)])
    p.text(24, 134, "INT8 keys")
    p.text(24, 176, "keys and\nvalues")
    p.bracket(x, x + first * step - 1, 207, "first")
    p.text(408, 222, "the k best: guess a threshold, count, refine", QUIET, "middle")
    p.bracket(x + (count - last) * step, x + count * step - 1, 207, "last")
    p.legend(
        ROUGH, "scanned, 8 bits", MEASURED, "decides", EXACT, "read exactly", UNREAD, "not read"
    )  # fmt: skip


def sketch(p: Picture) -> None:
    """decode: the best tokens are read, the rest is estimated

    A strip of tokens. Each has a sketch of its key, of 4 and 2 bits a coordinate, which gives a
    score. The k best tokens, the first block and the last blocks are read exactly. The others are
    not dropped: their part of the output is estimated from the scores.
    """
    x, step, count, first, last = 132, 9.4, 60, 4, 12
    read = tokens(p, scores(count, 40, (9, 10, 19, 26, 35, 43)), 6, first, last)
    for y in (118, 129):
        p.strip(x, y, step, 9, [ROUGH] * count)
    p.strip(x, 163, step, 28, [EXACT if i in read else HATCH for i in range(count)])
    p.box(x, 205, 380, 20, EXACT, "exact part: first, k best, last")
    p.box(x + 380, 205, 183, 20, HATCH)
    p.box(x + 390, 207, 163, 16, WHITE, "estimate of the rest")
    p.text(24, 134, "sketches")
    p.text(24, 173, "keys and\nvalues")
    p.text(24, 220, "output")
    p.legend(
        ROUGH, "4 and 2 bits a number", MEASURED, "decides",
        EXACT, "read exactly", HATCH, "not read, estimated",
    )  # fmt: skip


def certified(p: Picture) -> None:
    """decode: every head has a proved bound, or is exact

    Two tiers. The GPU holds keys as INT8 and values as INT4. The host holds the originals, of
    which single blocks are read. Each head's error bound is held against the tolerance: a head
    within it is returned with its bound, any other is recomputed from the originals.
    """
    p.box(24, 50, 372, 84, WHITE)
    p.box(24, 146, 372, 80, WHITE)
    p.strip(128, 78, 18.5, 20, [ROUGH] * 14)
    p.strip(128, 109, 18.5, 12, [ROUGH] * 14)
    p.strip(128, 176, 18.5, 36, [EXACT if i in (3, 9) else UNREAD for i in range(14)])
    p.text(34, 68, "GPU: quantized, read whole", bold=True)
    p.text(34, 164, "host: originals, read where needed", bold=True)
    for y, label in ((93, "keys INT8"), (120, "values INT4"), (199, "16 bits")):
        p.text(34, y, label)
    x, limit = 424, 578
    p.box(x, 80, 88, 16, MEASURED)
    p.box(x, 140, 208, 16, MEASURED)
    p.line((limit, 72), (limit, 226), color=DECIDES, dash="5 3")
    p.text(x, 64, "bound of each head")
    p.text(limit, 64, "tolerance", DECIDES)
    p.text(x, 112, "head 1: within", QUIET)
    p.text(x, 172, "head 2: above", QUIET)
    p.text(limit + 8, 94, "✓ returned", bold=True)
    p.text(limit + 8, 112, "with its bound", QUIET)
    p.text(limit + 8, 172, "recomputed", QUIET)
    p.arrow((606, 178), (606, 200), (399, 200), color=EXACT)
    p.text(616, 205, "✓ exact", bold=True)
    p.legend(
        ROUGH, "low precision", MEASURED, "proved error bound, decides",
        EXACT, "read exactly", UNREAD, "not read",
    )  # fmt: skip


def stream(p: Picture) -> None:
    """trace: which key blocks matter, while another method serves

    A triangle of query blocks by key blocks, in which the k strongest key blocks of each query
    block are marked by their weight. They are written to a file as a list of edges, which a page
    in the browser shows. The model computes the same as without it.
    """
    x, y, cell, edges = 80, 66, 17, []
    for row in range(9):
        picks = best(scores(row + 1, 7 * row + 3, (0, row, 4)), 3, 0, row + 1)
        weights = {column: 1 - 0.33 * rank for rank, column in enumerate(picks)}
        edges += [(row, column, weights[column]) for column in picks]
        for column in range(row + 1):
            spot = (x + column * cell, y + row * cell, cell - 1.5, cell - 1.5)
            p.box(*spot, UNREAD)
            if column in weights:
                p.box(*spot, MEASURED, opacity=weights[column])
    p.text(x + 52, y + 11, "key blocks →", QUIET)
    p.text(x - 8, y + 11, "query\nblocks\n↓", QUIET, "end")
    p.arrow((240, 142), (274, 142))
    p.shape((282, 78), (394, 78), (414, 98), (414, 206), (282, 206), fill=WHITE)
    p.text(292, 101, "run.parquet", bold=True)
    for i, (row, column, weight) in enumerate(edges[-6:-2]):
        p.text(292, 126 + i * 20, f"{row} → {column}", QUIET)
        p.box(348, 116 + i * 20, 50 * weight, 10, MEASURED)
    p.arrow((424, 142), (464, 142))
    p.box(472, 78, 224, 128, WHITE)
    p.box(472, 78, 224, 20, UNREAD)
    p.strip(480, 84, 13, 8, [WHITE] * 3)
    p.text(486, 124, "“… six, seven, …”", bold=True)
    for i, weight in enumerate((1, 0.35, 0.7, 0.2, 0.9, 0.5, 0.3, 0.8)):
        p.box(486 + 25 * i, 135, 23, 20, MEASURED, opacity=weight)
    p.text(486, 178, "what each word reads,\nlayer by layer", QUIET)
    p.text(348, 224, "a list of edges", QUIET, "middle")
    p.text(584, 224, "a page in any browser", QUIET, "middle")
    same = "The model's output stays the same, bit for bit."
    p.legend(MEASURED, "the k strongest, by weight", UNREAD, "not listed", note=same)


def dense(p: Picture) -> None:
    """exact attention: all valid keys, and nothing behind them

    A strip of the slots of a static cache. The valid part is cut into pieces that programs read
    side by side, and a merge joins them. Slots behind the length are not read.
    """
    x, step, count, valid = 108, 24.5, 24, 16
    p.strip(x, 80, step, 40, [EXACT if i < valid else UNREAD for i in range(count)])
    edge = x + valid * step - 1
    p.line((edge, 56), (edge, 126), color=MEASURED, width=3)
    p.text(edge + 8, 68, "length, read on the device", DECIDES)
    p.text(x + 20 * step, 141, "room, never read", QUIET, "middle")
    for i in range(4):
        left, right = x + 4 * i * step, x + 4 * (i + 1) * step - 4
        p.bracket(left, right, 130)
        middle = (left + right) / 2
        p.arrow((middle, 130), (middle, 150))
        p.box(middle - 36, 153, 72, 26, WHITE, f"piece {i + 1}")
        p.line((middle, 179), (middle, 209))
    p.arrow((x + 2 * step - 2.75, 209), (522, 209))
    p.box(525, 190, 171, 36, EXACT, "merge: exact output")
    p.text(24, 96, "static\ncache")
    p.text(24, 171, "programs")
    p.legend(EXACT, "read exactly, once", MEASURED, "decides", UNREAD, "not read")


def exact(p: Picture) -> None:
    """decode: sparse steps draft, one dense pass verifies

    Six draft tokens by sparse steps. One dense pass over all of them says which token dense
    attention chooses at each place. The first three agree and are accepted. The fourth does not:
    dense's own token replaces it, and the drafts behind it are dropped.
    """
    x, step, width, accepted = 152, 60, 48, 3
    p.box(x - 8, 116, 7 * step + 4, 44, WHITE)
    for i in range(7):
        left, middle, kept = x + i * step, x + i * step + width / 2, i <= accepted
        if i < 6:
            p.box(left, 64, width, 28, ROUGH if kept else UNREAD, f"d{i + 1}")
        if i < 5:
            p.arrow((left + width, 78), (left + step, 78))
        p.box(left, 124, width, 28, MEASURED if kept else UNREAD, f"y{i}")
        if kept:
            p.text(middle, 110, "=" if i < accepted else "≠", anchor="middle", size=16, bold=True)
            p.arrow((middle, 162), (middle, 189))
            p.box(left, 192, width, 28, EXACT, f"✓ d{i + 1}" if i < accepted else f"y{i}", True)
    p.text(24, 75, "sparse steps\ndraft d")
    p.text(24, 135, "one dense pass\nchooses y")
    p.text(24, 203, "tokens of\nthe round")
    p.text(x + 4 * step, 203, "dense's own token replaces\nthe first wrong draft")
    p.text(588, 75, "each reads\na few keys", QUIET)
    p.text(588, 127, "reads the\nwhole cache,\nonce", QUIET)
    p.legend(
        ROUGH, "draft", MEASURED, "dense's choice, decides",
        EXACT, "token as dense gives it", UNREAD, "dropped",
    )  # fmt: skip


def trained(p: Picture) -> None:
    """prefill and decode: the model's own indexer picks

    A strip of cached tokens. The indexer that the model was trained with gives each of them a score
    from a small index key. Attention reads the k best tokens, and no other.
    """
    x, step, count = 132, 9.4, 60
    read = tokens(p, scores(count, 5, (3, 12, 13, 24, 36, 45, 53, 58)), 8, 0, 0)
    p.strip(x, 118, step, 22, [ROUGH] * count)
    p.strip(x, 163, step, 34, [EXACT if i in read else UNREAD for i in range(count)])
    p.text(24, 134, "index keys")
    p.text(24, 176, "keys and\nvalues")
    p.text(408, 222, "k and the scores are the model's, as it was trained", QUIET, "middle")
    p.legend(
        ROUGH, "small, all read", MEASURED, "decides", EXACT, "read exactly", UNREAD, "not read"
    )  # fmt: skip


def auto(p: Picture) -> None:
    """chooses a method for each layer and phase, once, when applied

    Layers as rows, with their prefill and their decode by length. Below a measured crossover each
    is dense. Above it prefill is momo and decode is sketch. A layer without room for sketch keeps
    dense, and a sliding-window layer stays the model's own.
    """
    width, height = 276, 28
    for i in range(4):
        p.text(24, 115 + 33 * i, f"layer {i + 1}")
    for phase, x, share, axis, method in (
        ("prefill", 96, 0.36, "prompt length →", "momo"),
        ("decode", 420, 0.52, "cache size →", "sketch"),
    ):
        cut = x + share * width
        p.text(x, 66, phase, bold=True)
        p.text(x + width, 66, axis, QUIET, "end")
        p.text(cut, 87, "crossover", DECIDES, "middle")
        for i in range(4):
            y = 96 + 33 * i
            if i == 2:
                p.box(x, y, width, height, UNREAD, "sliding window: the model's own")
            elif i == 0 and phase == "decode":
                p.box(x, y, width, height, WHITE, "dense: no room for sketch")
            else:
                p.box(x, y, cut - x, height, WHITE, "dense")
                p.box(cut, y, x + width - cut, height, EXACT, method, bold=True)
                p.box(cut - 2, y - 2, 4, height + 4, MEASURED)
    p.legend(
        EXACT, "chosen", WHITE, "dense", UNREAD, "not served",
        MEASURED, "decides: quality, device, shape, room, length",
    )  # fmt: skip


METHODS = (momo, gather, gvr, sketch, certified, stream, dense, exact, trained, auto)


def pictures() -> dict[str, str]:
    """The text of each file in docs/img, by its name."""
    return {f"how-{draw.__name__}.svg": Picture(draw).svg() for draw in METHODS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws docs/img/how-NAME.svg of each method.")
    default = Path(__file__).resolve().parent.parent / "docs" / "img"
    parser.add_argument("--out", type=Path, default=default, help="the folder of the pictures")
    folder = parser.parse_args(arguments).out
    for name, text in pictures().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"drew {folder / name}")


if __name__ == "__main__":
    main()
