"""The viewer's page holds what the trace holds: edges, weights, masks and text, in its limit."""

import base64
import gzip
import json
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from typer.testing import CliRunner

from attnplug.cli import app
from attnplug.errors import ArgumentError
from attnplug.trace import Layout, Writer, read, synthesize
from attnplug.trace.pack import Edges, Mask, strongest
from attnplug.trace.view import parse_layers, parse_masks, write_page

ELEMENT = re.compile(r'<script type="application/octet-stream" id="([\w-]+)">(.*?)</script>', re.S)
META = re.compile(r'<script type="application/json" id="meta">(.*?)</script>', re.S)


def contents(page):
    """(meta, name -> bytes) of a page."""
    text = page.read_text("utf-8")
    found = META.search(text)
    assert found is not None
    elements = {
        name: gzip.decompress(base64.b64decode(body)) for name, body in ELEMENT.findall(text)
    }
    return json.loads(found[1]), elements


def values(codes, ends, logarithmic=True):
    """Weights of their codes."""
    low, high = ends
    value = low + (codes.astype(float) - 1) / 254 * (high - low)
    return np.where(codes > 0, np.exp(value) if logarithmic else value, 0)


def unpacked(meta, body, layer):
    """(rows, key blocks, weights, share seen by each mask) as the page's code reads them."""
    rows, masks = meta["heads"] * meta["queryBlocks"], len(meta["masks"])
    data = np.frombuffer(body, np.uint8)
    counts = data[:rows].astype(int)
    edges = counts.sum()
    low, high, weight, *seen = data[rows : rows + (3 + masks) * edges].reshape(3 + masks, edges)
    row = np.repeat(np.arange(rows), counts)
    step = low + 256 * high.astype(int)
    total = np.cumsum(step)
    first = np.cumsum(counts) - counts
    key = total - np.repeat(np.r_[0, total][first], counts)
    logarithmic = meta["weights"] != "score"
    return row, key, values(weight, meta["layers"][layer]["range"], logarithmic), seen


def edges_of(trace, layer, query_blocks):
    table = trace.edges(layer, sequence=0)
    head, q, k, weight = (
        table.column(n).to_numpy() for n in ("head", "q_block", "k_block", "weight")
    )
    row = head.astype(int) * query_blocks + q
    order = np.lexsort((k, row))
    return row[order], k[order], weight[order]


def small(path, weights="mass", **options):
    """A trace of 40 query blocks; of the seeds, one a test."""
    rng = np.random.default_rng(options.pop("seed", 0))
    with Writer(path, Layout(16, 16, weights), model="small", **options) as writer:
        writer.begin([0], [640])
        for layer in (2, 5):
            index = np.sort(rng.integers(-1, np.arange(40)[:, None] + 1, (1, 3, 40, 6)), -1)
            index[..., 1:][index[..., 1:] == index[..., :-1]] = -1
            weight = rng.exponential(size=index.shape) - (0.5 if weights == "score" else 0)
            writer.append(layer, index.astype(np.int32), weight.astype(np.float32))
    return read(path)


@pytest.mark.parametrize("weights", ["mass", "value", "score"])
def test_the_page_holds_every_edge(tmp_path, weights):
    trace = small(tmp_path / "t.parquet", weights)
    size = write_page(trace, tmp_path / "t.html")
    assert size == (tmp_path / "t.html").stat().st_size
    meta, elements = contents(tmp_path / "t.html")
    assert [layer["layer"] for layer in meta["layers"]] == [2, 5]
    assert meta["grid"] is None and meta["weights"] == weights
    for place, layer in enumerate((2, 5)):
        row, key, weight, _ = unpacked(meta, elements[f"layer-{place}"], place)
        row_, key_, weight_ = edges_of(trace, layer, 40)
        np.testing.assert_array_equal(row, row_)
        np.testing.assert_array_equal(key, key_)
        low, high = meta["layers"][place]["range"]
        if weights == "score":
            np.testing.assert_allclose(weight, weight_, atol=(high - low) / 508 * 1.001)
        else:
            np.testing.assert_allclose(weight, weight_, rtol=np.expm1((high - low) / 508 * 1.001))
            assert np.expm1((high - low) / 508) < 0.033
        assert meta["layers"][place]["kept"] == [1.0] * 3
        sizes = trace.list_sizes(layer)
        np.testing.assert_array_equal(sizes.ravel(), np.bincount(row_, minlength=sizes.size))
        listed = meta["layers"][place]["listed"]
        np.testing.assert_allclose(listed, sizes.mean(1), atol=1e-4)


def test_the_same_trace_makes_the_same_page(tmp_path):
    small(tmp_path / "t.parquet")
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        write_page(tmp_path / "t.parquet", page, masks={"other": tmp_path / "t.parquet"})
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_a_page_too_small_for_all_keeps_the_heaviest_and_the_sums_of_all(tmp_path):
    synthesize(tmp_path / "t.parquet", tokens=65536, layers=2, heads=4)
    trace = read(tmp_path / "t.parquet")
    whole = write_page(trace, tmp_path / "whole.html", limit_mb=30)
    limit = whole / 1e6 - 0.1
    assert write_page(trace, tmp_path / "t.html", limit_mb=limit) <= limit * 1e6 < whole
    meta, elements = contents(tmp_path / "t.html")
    keep, grid = meta["keep"], meta["grid"]
    assert 1 <= keep < 16
    blocks = meta["queryBlocks"]
    for layer in (0, 1):
        row, key, *_ = unpacked(meta, elements[f"layer-{layer}"], layer)
        row_, key_, weight_ = edges_of(trace, layer, blocks)
        best = np.lexsort((key_, -weight_, row_))
        place = np.arange(len(row_)) - np.searchsorted(row_[best], row_[best])
        wanted = np.sort(best[place < keep])
        np.testing.assert_array_equal(row, row_[wanted])
        np.testing.assert_array_equal(key, key_[wanted])
        share = np.bincount(row_[wanted] // blocks, weight_[wanted]) / np.bincount(
            row_ // blocks, weight_
        )
        np.testing.assert_allclose(meta["layers"][layer]["kept"], share, atol=1e-4)
        rows, columns = grid["rows"], grid["columns"]
        codes = np.frombuffer(elements[f"layer-{layer}"], np.uint8)[-4 * rows * columns :]
        sums = values(codes, meta["layers"][layer]["gridRange"]).reshape(4, rows, columns)
        for head in range(4):
            oracle = trace.heatmap(layer, head, rows=rows, columns=columns)
            np.testing.assert_allclose(sums[head], oracle, rtol=0.033, atol=1e-5 * oracle.max())


def test_a_limit_that_nothing_fits_is_refused(tmp_path):
    small(tmp_path / "t.parquet")
    with pytest.raises(ArgumentError, match="do not fit"):
        write_page(tmp_path / "t.parquet", tmp_path / "t.html", limit_mb=4.0)
    assert not (tmp_path / "t.html").exists()


@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=40).map(sorted),
    most=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_strongest_keeps_the_heaviest_of_each_row(rows, most, seed):
    row = np.array(rows)
    weight = np.random.default_rng(seed).integers(0, 4, len(row)).astype(np.float32)
    edges = Edges(row, np.arange(len(row)), weight)
    kept = strongest(edges, most)
    wanted = []
    for one in sorted(set(rows)):
        mine = [i for i in range(len(rows)) if rows[i] == one]
        wanted += sorted(sorted(mine, key=lambda i: (-weight[i], i))[:most])
    assert kept.tolist() == wanted


def recorded(path, block, query_block, chunks, index):
    """A one-layer, two-head trace of chunks of queries, with given lists by query block."""
    with Writer(path, Layout(query_block, block, "mass")) as writer:
        at = used = 0
        for queries in chunks:
            writer.begin([at], [queries])
            count = -(-queries // query_block)
            part = index[:, :, used : used + count]
            writer.append(0, part, np.ones(part.shape, np.float32))
            at, used = at + queries, used + count
    return read(path)


@given(data=st.data())
def test_seen_is_the_share_of_token_pairs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    size = st.sampled_from([2, 3, 4, 8])
    chunks = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    tokens = sum(chunks)
    traces = []
    for name in ("trace", "mask"):
        query_block, block = data.draw(size), data.draw(size)
        count = sum(-(-n // query_block) for n in chunks)
        keys = -(-tokens // block)
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        index = np.argsort(rng.random((1, 2, count, keys)), -1).astype(np.int32)
        index[rng.random(index.shape) < 0.5] = -1
        traces.append(recorded(folder / name, block, query_block, chunks, index))
    trace, mask = traces

    def pairs(one):
        """Token pairs that each edge covers: bool [heads, tokens, tokens]."""
        out = np.zeros((2, tokens, tokens), bool)
        spans = one.query_blocks()
        for edge in one.edges(0).to_pylist():
            first, end = spans[edge["q_block"]]
            keys = slice(edge["k_block"] * one.block, (edge["k_block"] + 1) * one.block)
            out[edge["head"], first:end, keys] = True
        return out & np.tri(tokens, dtype=bool)

    covered = pairs(mask)
    spans = trace.query_blocks()
    row, key, weight = edges_of(trace, 0, len(spans))
    edges = Edges(row, key.astype(np.int64), weight)

    class packer:
        pass

    packer.trace, packer.spans = trace, spans
    seen = Mask("mask", mask, 0).seen(0, edges, packer)
    for r, k, share in zip(row, key, seen, strict=True):
        head, q = divmod(int(r), len(spans))
        mine = np.zeros((tokens, tokens), bool)
        mine[slice(*spans[q]), k * trace.block : (k + 1) * trace.block] = True
        mine &= np.tri(tokens, dtype=bool)
        oracle = covered[head][mine].mean() if mine.any() else 1.0
        assert share == pytest.approx(oracle, abs=1e-6)


def test_a_mask_without_the_layer_or_the_tokens_misses_nothing(tmp_path):
    index = np.arange(4, dtype=np.int32).repeat(4).reshape(1, 1, 4, 4)
    index = np.concatenate([index, index], 1)
    trace = recorded(tmp_path / "t", 8, 8, [32], index)
    mask = recorded(tmp_path / "m", 8, 8, [16], index[:, :, :2, :1] * 0 - 1)
    write_page(trace, tmp_path / "t.html", masks={"short": mask})
    meta, elements = contents(tmp_path / "t.html")
    row, _, _, (seen,) = unpacked(meta, elements["layer-0"], 0)
    np.testing.assert_array_equal(seen, np.where(row % 4 < 2, 0, 255))


def test_missed_shares_are_those_of_the_trace(tmp_path):
    trace = small(tmp_path / "t.parquet", seed=1)
    other = small(tmp_path / "m.parquet", seed=2)
    write_page(trace, tmp_path / "t.html", masks={"other": other})
    meta, _ = contents(tmp_path / "t.html")
    for place, layer in enumerate((2, 5)):
        missed, total = np.zeros(3), np.zeros(3)
        named = {(e["head"], e["q_block"], e["k_block"]) for e in other.edges(layer).to_pylist()}
        for e in trace.edges(layer).to_pylist():
            total[e["head"]] += e["weight"]
            if (e["head"], e["q_block"], e["k_block"]) not in named:
                missed[e["head"]] += e["weight"]
        np.testing.assert_allclose(meta["layers"][place]["missed"][0], missed / total, atol=1e-4)


def test_text_and_token_lengths_survive(tmp_path):
    words = ["</script>", " é", "😀", " naïve", "x" * 600]
    pieces = [b"</script>", b" ", "é".encode()[:1], "é".encode()[1:], "😀".encode()[:3]]
    pieces += ["😀".encode()[3:], " naïve".encode(), b"x" * 600]
    with Writer(tmp_path / "t.parquet", Layout(4, 4, "mass")) as writer:
        writer.name_tokens([np.arange(8)], dict(enumerate(pieces)))
        writer.begin([0], [8])
        writer.append(0, np.zeros((1, 1, 2, 1), np.int32), np.ones((1, 1, 2, 1), np.float32))
    write_page(tmp_path / "t.parquet", tmp_path / "t.html")
    _, elements = contents(tmp_path / "t.html")
    text = elements["text"].decode()
    assert text == "".join(words)
    lengths, held = [], 0
    for byte in elements["lengths"]:
        held += byte
        if byte < 255:
            lengths.append(held)
            held = 0
    assert lengths == [9, 1, 0, 1, 0, 2, 6, 600]


def test_nothing_in_the_page_is_fetched(tmp_path):
    small(tmp_path / "t.parquet")
    write_page(tmp_path / "t.parquet", tmp_path / "t.html", title="<b>&</b>")
    text = (tmp_path / "t.html").read_text("utf-8")
    assert "default-src 'none'" in text
    own = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "<title>&lt;b&gt;&amp;&lt;/b&gt;</title>" in own
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)|url\(|@import""", own)


def test_options_are_read():
    assert parse_layers(None) is None
    assert parse_layers("0-2,7") == [0, 1, 2, 7]
    assert parse_masks(["momo=a=b.parquet", "gather=c"]) == {"momo": "a=b.parquet", "gather": "c"}
    for wrong in ("", "a", "1-", "1,,2", "0-99999999999"):
        with pytest.raises(ArgumentError, match="layers"):
            parse_layers(wrong)
    for wrong in (["momo"], ["=x"], ["momo="], ["a=b", "a=c"]):
        with pytest.raises(ArgumentError, match="mask"):
            parse_masks(wrong)


@pytest.mark.parametrize("name", ["t.parquet", "t.html", "mask.html"])
def test_no_page_replaces_a_trace(tmp_path, name):
    for each in ("t.parquet", "mask.html"):
        small(tmp_path / each)
    (tmp_path / "t.html").symlink_to(tmp_path / "t.parquet")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ArgumentError, match="the page would replace the trace"):
        write_page(tmp_path / "t.parquet", tmp_path / name, masks={"a": tmp_path / "mask.html"})
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize(("name", "page"), [("t.html", "t.html.html"), ("[red]", "[red].html")])
def test_the_command_names_a_page_beside_the_trace(tmp_path, name, page):
    small(tmp_path / name)
    run = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["trace", "view", str(tmp_path / name)])
    assert run.exit_code == 0, run.output
    assert page in run.output and read(tmp_path / name).layers
    assert (tmp_path / page).read_text().startswith("<!doctype html>")


def test_the_command_makes_the_page(tmp_path):
    small(tmp_path / "t.parquet")
    file = str(tmp_path / "t.parquet")
    run = CliRunner().invoke(app, ["trace", "view", file, "--mask", f"me={file}", "--layers", "5"])
    assert run.exit_code == 0, run.output
    meta, _ = contents(tmp_path / "t.html")
    assert [layer["layer"] for layer in meta["layers"]] == [5]
    assert meta["masks"] == ["me"] and meta["layers"][0]["missed"] == [[0.0] * 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "3"], "layers [3]"),
        (["--sequence", "1"], "sequence 1"),
        (["--mask", "x"], "NAME"),
        (["--limit-mb", "nan"], "limit_mb is nan, needs a number of megabytes"),
        (["--limit-mb", "inf"], "limit_mb is inf, needs a number of megabytes"),
        (["--out", "/dev/null/page.html"], "where a file cannot be written"),
        (["--out", "."], "where a file cannot be written"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, arguments, words):
    small(tmp_path / "t.parquet")
    run = CliRunner().invoke(app, ["trace", "view", str(tmp_path / "t.parquet"), *arguments])
    assert run.exit_code == 1
    assert words in run.output
