"""Makes the offline page that shows a trace: one HTML file with the plotting library, the edges and
the text inside, of bounded size. The page's own parts lie in `page/`.

Every edge is in the page where they all fit. Where they do not, each query block of each head keeps
its heaviest edges, as many as fit, and a grid with the sums of all edges shows the whole: the page
says so. Weights are rounded to one byte, 3 % at most; shares are computed before."""

import base64
import codecs
import gzip
import html
import importlib.resources
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from attnplug import files
from attnplug.errors import ArgumentError
from attnplug.files import located
from attnplug.trace.pack import KEY_BLOCKS, MOST_EDGES, Grid, Mask, Packer
from attnplug.trace.reader import Trace, read
from attnplug.version import __version__

SCRIPTS = ("data.js", "colors.js", "map.js", "heads.js", "panel.js", "app.js")
USUAL = 0.7  # of the bytes of edges, what gzip leaves of most traces
OWN = 128 << 10  # the page's own code, and each layer's tags and numbers, with room
MOST_LAYERS = 4096  # that a text may name
CELLS = 256  # a side of the grid, at most


def write_page(
    trace: Trace | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    masks: Mapping[str, Trace | str | os.PathLike[str]] | None = None,
    layers: Iterable[int] | None = None,
    sequence: int = 0,
    limit_mb: float = 32.0,
    title: str | None = None,
    progress: bool = False,
) -> int:
    """Write the page of a trace to `out` and return its size in bytes.

    Args:
        trace: a trace, or the file of one.
        masks: by name, traces whose edges are what a policy selected; the page marks the edges of
            `trace` that they miss. Block sizes may differ.
        layers: the layers to show; None for all.
        sequence: which sequence of the batch.
        limit_mb: megabytes (1e6 bytes) that the page may have.
        title: heading; None for the model's name.
        progress: whether to show a progress bar on stderr.

    Raises:
        ArgumentError: a file is no trace, a layer or sequence is not in it, or less than one
            edge of each query block fits.
    """
    if not math.isfinite(limit_mb * 1e6):
        raise ArgumentError(f"view: limit_mb is {limit_mb}, needs a number of megabytes")
    trace = _opened(trace)
    opened = {name: _opened(mask) for name, mask in (masks or {}).items()}
    page, read = located(out, ArgumentError), (trace, *opened.values())
    if page in [located(shown.path, ArgumentError) for shown in read]:
        raise ArgumentError(f"view: the page would replace the trace {out}; name another place")
    chosen = _chosen_layers(trace, layers)
    spans, keys = _sizes(trace, sequence)
    others = [Mask(name, mask, sequence) for name, mask in opened.items()]
    texts = _text(trace, sequence)
    library = _library()
    used = len(library.encode()) + sum(map(len, texts.values())) + OWN + 256 * len(chosen)
    room = int(limit_mb * 1e6) - used
    for keep, grid in _plans(trace, chosen, sequence, len(spans), keys, len(others), room):
        packer = Packer(trace, sequence, spans, keep, grid, others)
        packed = _pack(packer, chosen, room, progress)
        if packed is not None:
            break
    else:
        raise ArgumentError(
            f"view: {len(chosen)} layers of {trace.heads} heads and {len(spans)} query blocks do "
            f"not fit: the limit leaves {room / 1e6:.1f} MB for edges; name fewer layers or raise "
            "the limit"
        )
    bodies, about = packed
    meta = _meta(trace, sequence, packer, keys, about) | {"text": "text" in texts}
    page = _render(title or trace.meta["model"] or "trace", meta, {**texts, **bodies}, library)
    files.write_text(out, page)
    return len(page.encode())


def _pack(
    packer: Packer, layers: list[int], room: int, progress: bool
) -> tuple[dict[str, str], list[dict[str, Any]]] | None:
    """The layers' elements, and what the page says of them; None where they do not fit."""
    bodies, about = {}, []
    console = Console(stderr=True)
    for place, layer in enumerate(
        track(layers, "packing layers", console=console, transient=True, disable=not progress)
    ):
        body, notes = packer.layer(layer)
        bodies[f"layer-{place}"] = _packed(body)
        about.append(notes)
        room -= len(bodies[f"layer-{place}"]) + len(json.dumps(notes))
        if room < 0:
            return None
    return bodies, about


def parse_masks(options: Iterable[str]) -> dict[str, str]:
    """Name -> file, of options such as "momo=momo.parquet"."""
    masks = {}
    for option in options:
        name, equals, file = option.partition("=")
        if not (name and equals and file):
            raise ArgumentError(f"view: mask {option!r}, needs NAME=FILE such as momo=momo.parquet")
        if name in masks:
            raise ArgumentError(f"view: two masks have the name {name!r}")
        masks[name] = file
    return masks


def parse_layers(text: str | None) -> list[int] | None:
    """Layers of a text such as "0-3,7"; None for None."""
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            span = range(int(first), int(last if dash else first) + 1)
        except ValueError as error:
            raise ArgumentError(f"view: layers {text!r}, need a list such as 0-3,7") from error
        if len(span) > MOST_LAYERS:
            raise ArgumentError(f"view: layers {text!r} are more than any model has")
        layers += span
    return layers


def _opened(trace: Trace | str | os.PathLike[str]) -> Trace:
    return trace if isinstance(trace, Trace) else read(trace)


def _chosen_layers(trace: Trace, layers: Iterable[int] | None) -> list[int]:
    chosen = trace.layers if layers is None else sorted(set(layers))
    unknown = [layer for layer in chosen if layer not in trace.layers]
    if unknown or not chosen:
        raise ArgumentError(f"view: layers {unknown or chosen}, the trace has {trace.layers}")
    return chosen


def _sizes(trace: Trace, sequence: int) -> tuple[np.ndarray, int]:
    """Token spans of the query blocks, and the number of key blocks."""
    if not 0 <= sequence < trace.meta["sequences"]:
        raise ArgumentError(f"view: sequence {sequence}, the trace has {trace.meta['sequences']}")
    keys = trace.key_count(sequence)
    if keys > KEY_BLOCKS:
        raise ArgumentError(f"view: {keys} key blocks, the page holds {KEY_BLOCKS}")
    return trace.query_blocks(sequence), keys


def _plans(
    trace: Trace, layers: list[int], sequence: int, queries: int, keys: int, masks: int, room: int
) -> Iterator[tuple[int, Grid | None]]:
    """How many edges of a row the page keeps, and the grid it needs where those are not all: from
    what gzip may make fit to what fits whatever the edges."""
    heads, rows = len(layers) * trace.heads, len(layers) * trace.heads * queries
    space = room * 3 / 4 - rows
    if _edge_count(trace, layers, sequence) * (3 + masks) * USUAL <= space:
        yield MOST_EDGES, None
    side = CELLS
    while side > 32 and heads * side**2 / 2 * (1 + masks) > space / 4:
        side //= 2
    q_step, k_step = _step(queries, side), _step(keys, side)
    grid = Grid(q_step, k_step, -(-queries // q_step), -(-keys // k_step))
    # Causal: the cells above the diagonal are zeros, which gzip makes next to nothing of.
    space -= heads * grid.rows * grid.columns * (1 + masks) / 2
    most = space / max(rows, 1) / (3 + masks)
    for keep in sorted(
        {int(most / USUAL), int(most / USUAL * 0.85), int(most * 0.98)}, reverse=True
    ):
        if keep >= 1:
            yield min(keep, MOST_EDGES), grid


def _edge_count(trace: Trace, layers: list[int], sequence: int) -> int:
    if layers == trace.layers and trace.meta["sequences"] == 1:
        return trace.meta["edges"]
    return sum(
        part.num_rows for layer in layers for part in trace.batches(layer, sequence=sequence)
    )


def _step(blocks: int, side: int) -> int:
    step = 1
    while -(-blocks // step) > side:
        step *= 2
    return step


def _meta(
    trace: Trace, sequence: int, packer: Packer, keys: int, about: list[dict[str, Any]]
) -> dict[str, Any]:
    meta = trace.meta
    named = ("model", "policy", "method", "options", "weights", "edges", "versions", "checksum")
    captured = meta["captured"] or {}
    for layer in about:
        layer["captured"] = captured.get(str(layer["layer"]))
    steps = [
        [step["first"][sequence], step["queries"][sequence], step["blocks"]]
        for step in meta["steps"]
    ]
    return {
        **{name: meta[name] for name in named},
        "heads": trace.heads,
        "tokens": meta["tokens"][sequence],
        "queryBlock": meta["query_block"],
        "keyBlock": trace.block,
        "queryBlocks": len(packer.spans),
        "keyBlocks": keys,
        "steps": steps,
        "keep": packer.keep,
        "grid": packer.grid
        and {
            "qStep": packer.grid.q_step,
            "kStep": packer.grid.k_step,
            "rows": packer.grid.rows,
            "columns": packer.grid.columns,
        },
        "masks": [mask.name for mask in packer.masks],
        "layers": about,
    }


def _packed(body: bytes) -> str:
    return base64.b64encode(gzip.compress(body, 6, mtime=0)).decode()


def _text(trace: Trace, sequence: int) -> dict[str, str]:
    """The text, and of each token how many UTF-16 units of it it adds, as the page reads them. A
    character of several tokens belongs to the last of them."""
    pieces = trace.pieces(0, trace.meta["tokens"][sequence], sequence)
    if not pieces:
        return {}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(piece) for piece in pieces]
    texts[-1] += decoder.decode(b"", final=True)
    sizes = bytearray()
    for text in texts:
        more, size = divmod(len(text.encode("utf-16-le")) // 2, 255)
        sizes += b"\xff" * more
        sizes.append(size)
    return {"text": _packed("".join(texts).encode()), "lengths": _packed(bytes(sizes))}


def _library() -> str:
    """plotly.js, as the package plotly carries it."""
    from plotly.offline import get_plotlyjs  # half a second, only here

    return get_plotlyjs()


def _part(name: str) -> str:
    return (importlib.resources.files("attnplug.trace") / "page" / name).read_text("utf-8")


def _render(title: str, meta: dict[str, Any], data: Mapping[str, str], library: str) -> str:
    meta["versions"] = {**meta["versions"], "attnplug": __version__}
    elements = (
        f'<script type="application/octet-stream" id="{name}">{body}</script>'
        for name, body in data.items()
    )
    parts = {
        "title": html.escape(title),
        "style": _part("style.css"),
        "meta": json.dumps(meta, sort_keys=True, separators=(",", ":")).replace("<", "\\u003c"),
        "data": "\n".join(elements),
        "library": library,
        "code": "\n".join(map(_part, SCRIPTS)),
    }
    pieces = _part("page.html").split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        out += [parts[name], rest]
    return "".join(out)
