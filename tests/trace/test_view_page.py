"""The viewer's page in headless Chromium: what it shows is what the trace says, by mouse and by
keyboard, dark and light, small and large, and nothing leaves it."""

import shutil
import time

import numpy as np
import pytest

from attnplug.trace import Layout, Writer, read, synthesize
from attnplug.trace.view import write_page

# A page of one machine needs no sandbox, and a browser of a test no servers of its maker's.
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TOKENS, STEPS, LAYERS, HEADS = 32768, 4, 3, 4
LOAD_SECONDS = 60  # unmarked: what a shared machine may take; docs/trace-viewer.md has timings


@pytest.fixture(scope="module")
def browser():
    """Chromium from the PATH (apt-get install chromium), else the one of `playwright install`."""
    from playwright.sync_api import sync_playwright  # a machine for GPU tests need not have it

    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A made-up trace of 32K tokens with a mask beside it, and its page."""
    folder = tmp_path_factory.mktemp("page")
    needle = synthesize(
        folder / "t.parquet", tokens=TOKENS, layers=LAYERS, heads=HEADS, steps=STEPS
    )
    trace = read(folder / "t.parquet")
    thinned(trace, folder / "mask.parquet")
    write_page(trace, folder / "t.html", masks={"momo": folder / "mask.parquet"})
    return trace, folder / "t.html", needle


def thinned(trace, path):
    """A mask that keeps the even key blocks of the trace's edges, in the prefill."""
    with Writer(path, Layout(64, 64, "mass")) as writer:
        writer.begin([0], [TOKENS])
        for layer in trace.layers:
            dense = trace.dense(layer, queries=(0, TOKENS // 64)) > 0
            dense[..., 1::2] = False
            most = dense.sum(-1).max()
            index = np.argsort(~dense, -1, kind="stable")[..., :most].astype(np.int32)
            index[~np.take_along_axis(dense, index, -1)] = -1
            writer.append(layer, index[None], np.ones((1, *index.shape), np.float32))


@pytest.fixture
def open_page(browser):
    """Opens a page and gives it back when its first picture stands. No error may be logged and
    nothing asked of a network."""
    contexts, complaints = [], []

    def open_(path, width=1280, height=800, scheme="light", fragment=""):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: asked(request.url))
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("body[data-ready]", timeout=1000 * LOAD_SECONDS)
        return page

    def asked(url):
        if not url.startswith(("file:", "data:", "blob:")):
            complaints.append(f"asked for {url}")

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def until(page, condition):
    """Waits for a condition. The page forbids eval, which Playwright's own waiting needs."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


def settled(page):
    """Waits until the map is drawn and the panel shows what was chosen."""
    page.wait_for_timeout(100)
    until(page, "!map.busy() && !app.busy()")


def cells(page, kind="z", place=0):
    """Shown cells as (values, x0, dx, y0, dy)."""
    trace = page.evaluate(
        """(i) => { const t = document.getElementById("map").data[i];
        return {z: t.z.map((row) => [...row].map((v) => isNaN(v) ? null : v)),
                x0: t.x0, dx: t.dx, y0: t.y0, dy: t.dy}; }""",
        place,
    )
    values = np.array([[np.nan if v is None else v for v in row] for row in trace["z"]])
    return values, trace


def shares(trace, layer, head, rows):
    """log10 of the mean share of attention of each block pair, NaN where there is none."""
    dense = trace.dense(layer)[head][: rows[1]][rows[0] :]
    spans = trace.query_blocks()[rows[0] : rows[1]]
    with np.errstate(divide="ignore"):
        mean = np.log10(dense / (spans[:, 1] - spans[:, 0])[:, None])
    return np.where(np.isfinite(mean), mean, np.nan)


def choice(page):
    return page.input_value("#layer"), page.input_value("#head")


def listed(page, name):
    """Blocks of a list of edges, in its order."""
    return [
        int(x)
        for x in page.eval_on_selector_all(f"#{name} button", "l => l.map(b => b.dataset.block)")
    ]


def assert_shows(page, trace, layer, head):
    values, _ = cells(page)
    wanted = shares(trace, layer, head, (0, len(trace.query_blocks())))
    assert values.shape == wanted.shape
    np.testing.assert_allclose(values, wanted, atol=0.0145)  # 3.3 % of rounding
    assert f"ayer {layer}, head {head}" in page.inner_text("#shown")


def test_the_map_is_the_trace_in_every_layer_and_head(files, open_page):
    trace, path, _ = files
    page = open_page(path)
    assert_shows(page, trace, 0, 0)
    page.select_option("#layer", "2")
    page.select_option("#head", "1")
    settled(page)
    assert_shows(page, trace, 2, 1)
    page.locator("#map").focus()
    page.keyboard.press("[")
    page.keyboard.press(".")
    until(page, "document.getElementById('head').value === '2'")
    settled(page)
    assert choice(page) == ("1", "2")
    assert_shows(page, trace, 1, 2)


def test_all_heads_and_layers_are_the_mean(files, open_page):
    trace, path, _ = files
    page = open_page(path)
    page.select_option("#layer", "all")
    page.select_option("#head", "all")
    settled(page)
    values, _ = cells(page)
    total = sum(trace.dense(layer).sum(0) for layer in trace.layers)
    spans = trace.query_blocks()
    mean = total / (LAYERS * HEADS * (spans[:, 1] - spans[:, 0])[:, None])
    # no weight is drawn below a 10^-7th of the largest, here 64 queries' attention
    lowest = 64e-7 / (LAYERS * HEADS)
    shown = 10 ** np.nan_to_num(values, nan=-99)
    np.testing.assert_allclose(shown, mean, rtol=0.034, atol=1.01 * lowest)


def view(page):
    return page.evaluate("map.view()")


def width(page):
    low, high = view(page)["x"]
    return high - low


@pytest.mark.parametrize("way", ["keys", "buttons", "wheel", "drag"])
def test_zoom_shows_a_part(files, open_page, way):
    trace, path, _ = files
    page = open_page(path)
    before = width(page)
    box = page.locator("#map .nsewdrag.drag").first.bounding_box()
    middle = box["x"] + box["width"] / 3, box["y"] + 2 * box["height"] / 3
    if way == "keys":
        page.locator("#map").focus()
        page.keyboard.press("+")
    elif way == "buttons":
        page.click("#zoom-in")
    elif way == "wheel":
        page.mouse.move(*middle)
        page.mouse.wheel(0, -400)
    else:
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] + 100, middle[1] + 100, steps=4)
        page.mouse.up()
    until(page, f"map.view().x[1] - map.view().x[0] < {before * 0.95}")
    settled(page)
    (k0, k1), (q0, q1) = view(page)["x"], view(page)["y"]
    values, place = cells(page)
    assert place["dx"] == place["dy"] == 1
    first = int(place["x0"] - 0.5), int(place["y0"] - 0.5)
    assert first == (int(k0), int(q0)) and values.shape == (
        np.ceil(q1) - first[1],
        np.ceil(k1) - first[0],
    )
    wanted = shares(trace, 0, 0, (first[1], first[1] + len(values)))
    wanted = wanted[:, first[0] : first[0] + values.shape[1]]
    np.testing.assert_allclose(values, wanted, atol=0.0145)
    page.click("#zoom-reset")
    until(page, f"map.view().x[1] - map.view().x[0] === {before}")


def test_click_selects_a_block_with_its_text_and_edges(files, open_page):
    trace, path, _ = files
    page = open_page(path, fragment="#layer=1&head=2&q=300&k=100")
    page.click("#zoom-block")
    settled(page)
    # the heaviest edge in view that is not on the diagonal
    values, place = cells(page)
    queries = np.arange(len(values))[:, None] + int(place["y0"])
    keys = np.arange(values.shape[1]) + int(place["x0"])
    aside = np.where((queries > keys) & (queries != 300), np.nan_to_num(values, nan=-99), -99)
    i, j = np.unravel_index(aside.argmax(), aside.shape)
    q, k = int(queries[i, 0]), int(keys[j])
    at = page.evaluate(
        """([q, k]) => { const e = document.getElementById("map"), l = e._fullLayout;
        const b = e.getBoundingClientRect();
        return [b.left + l.xaxis._offset + l.xaxis.d2p(k + 0.5),
                b.top + l.yaxis._offset + l.yaxis.d2p(q + 0.5)]; }""",
        [q, k],
    )
    page.mouse.click(*at)
    until(page, f"document.getElementById('cards').innerText.includes('block {q}')")
    settled(page)
    texts = page.eval_on_selector_all("#cards .tokens", "list => list.map(e => e.textContent)")
    spans = trace.query_blocks()
    assert texts == [trace.text(*spans[q]), trace.text(64 * k, 64 * k + 64)]
    edges = [e for e in trace.edges(1, 2).to_pylist() if e["q_block"] == q]
    assert sorted(listed(page, "out")) == sorted(e["k_block"] for e in edges)
    heaviest = max(edges, key=lambda e: e["weight"])["k_block"]
    assert listed(page, "out")[0] == heaviest
    into = [e for e in trace.edges(1, 2).to_pylist() if e["k_block"] == k]
    assert set(listed(page, "in")) <= {e["q_block"] for e in into}
    assert len(listed(page, "in")) == min(len(into), 100)
    share = next(e["weight"] for e in edges if e["k_block"] == k) / 64
    shown = float(page.inner_text("#pair strong").removesuffix("%")) / 100
    assert shown == pytest.approx(share, rel=0.09)
    page.mouse.dblclick(*at)
    until(page, "map.view().x[1] - map.view().x[0] === 32")
    assert page.evaluate("[app.shown().q, app.shown().k]") == [q, k]
    # an edge of the list leads on
    page.click(f"#out button[data-block='{heaviest}']")
    settled(page)
    assert page.get_attribute("#out [aria-current]", "data-block") == str(heaviest)


def test_search_finds_the_needle_and_the_head_that_reads_it(files, open_page):
    trace, path, needle = files
    page = open_page(path)
    page.keyboard.press("/")
    page.keyboard.type("Magic  NUMBER is 48213")
    page.wait_for_selector("#results li")
    settled(page)
    assert page.inner_text("#search-status") == "match 1 of 1"
    ((first, end),) = trace.find(" magic number is 48213")
    assert first // 64 == needle
    assert page.eval_on_selector_all("#cards mark", "list => list.map(e => e.textContent)") == [
        piece.decode() for piece in trace.pieces(first, end)
    ]
    assert f"Block {needle}" in page.inner_text("#cards h2")
    # the last query reads it in the head that was made to
    last = len(trace.query_blocks()) - 1
    page.evaluate(f"app.selectBlocks({last}, {needle})")
    page.select_option("#measure", "edge")
    until(page, "document.getElementById('heads').dataset.measure === 'edge'")
    assert f"layer 1, head {HEADS - 1}" in page.get_attribute("#heads", "aria-label")
    page.fill("#search", "no such words")
    until(page, "document.getElementById('search-status').innerText === '0 matches'")


def test_matches_are_walked(files, open_page):
    trace, path, _ = files
    page = open_page(path)
    page.fill("#search", "their")
    page.wait_for_selector("#results li")
    found = trace.find("their")
    assert page.inner_text("#search-status") == f"match 1 of {len(found):,}"
    page.locator("#map").focus()
    page.keyboard.press("n")
    settled(page)
    assert f"Block {found[1][0] // 64}" in page.inner_text("#cards h2")
    page.keyboard.press("N")
    page.keyboard.press("N")
    settled(page)
    assert f"Block {found[-1][0] // 64}" in page.inner_text("#cards h2")


def test_what_a_mask_misses_stands_out(files, open_page):
    trace, path, _ = files
    page = open_page(path, fragment="#layer=1&head=0&q=200&k=7")
    page.locator("#map").focus()
    page.keyboard.press("m")
    until(page, "document.getElementById('mask').value === '0'")
    settled(page)
    kept, _ = cells(page)
    missed, _ = cells(page, place=1)
    wanted = shares(trace, 1, 0, (0, len(kept)))
    prefill = np.arange(len(kept))[:, None] < TOKENS // 64
    odd = np.arange(kept.shape[1]) % 2 == 1
    for shown, there in ((kept, ~(prefill & odd)), (missed, prefill & odd)):
        np.testing.assert_allclose(shown, np.where(there, wanted, np.nan), atol=0.0145)
    tagged = page.eval_on_selector_all(
        "#out li",
        "l => l.filter(e => e.querySelector('.lost-tag')).map(e => e.firstChild.dataset.block)",
    )
    edges = {e["k_block"] for e in trace.edges(1, 0).to_pylist() if e["q_block"] == 200}
    assert sorted(map(int, tagged)) == sorted(k for k in edges if k % 2)


def test_arrows_move_and_enter_zooms(files, open_page):
    _, path, _ = files
    page = open_page(path, fragment="#q=300&k=100")
    page.locator("#map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    settled(page)
    assert "Query block 301" in page.inner_text("#cards")
    assert "Key block 101" in page.inner_text("#cards")
    page.keyboard.press("Enter")
    until(page, "map.view().x[1] - map.view().x[0] === 32")
    page.keyboard.press("Shift+ArrowRight")
    until(page, "map.view().x[0] === 93.5")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    assert page.evaluate("document.activeElement.id") == "map"


def test_the_address_brings_a_view_back(files, open_page):
    _, path, _ = files
    page = open_page(path, fragment="#layer=1&head=3&q=300&k=100&mask=momo&view=90,130,280,320")
    assert choice(page) == ("1", "3") and page.input_value("#mask") == "0"
    assert view(page) == {"x": [90, 130], "y": [280, 320]}
    page.locator("#map").focus()
    page.keyboard.press("ArrowDown")
    until(page, "location.hash.includes('q=301')")
    assert "view=90%2C130%2C280%2C320" in page.evaluate("location.hash")


FAINT = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ratio = (element) => {
    let behind = element;
    while (/, 0\\)$|transparent/.test(getComputedStyle(behind).backgroundColor))
      behind = behind.parentElement;
    const [a, b] = [light(getComputedStyle(element).color),
                    light(getComputedStyle(behind).backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const shown = [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && !e.closest("svg, script, option") && own(e));
  return [shown.length, shown.filter((e) => ratio(e) < 4.5)
    .map((e) => `${ratio(e).toFixed(2)} ${e.outerHTML.slice(0, 80)}`)]; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_are_readable(files, open_page, scheme):
    _, path, _ = files
    page = open_page(path, scheme=scheme, fragment="#layer=1&head=0&q=200&k=7&mask=momo")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.fill("#search", "their")
    page.wait_for_selector("#results li")
    count, faint = page.evaluate(FAINT)
    assert count > 100 and faint == []
    before = page.evaluate("document.getElementById('map').layout.plot_bgcolor")
    page.click("#theme-button")
    settled(page)
    other = {"light": "dark", "dark": "light"}[scheme]
    assert page.evaluate("document.documentElement.dataset.theme") == other
    assert page.evaluate("document.getElementById('map').layout.plot_bgcolor") != before


@pytest.mark.parametrize("size", [(1280, 720), (2560, 1440), (800, 900)])
def test_everything_has_its_place(files, open_page, size):
    _, path, _ = files
    page = open_page(path, *size, fragment="#q=300&k=100&mask=momo")
    page.fill("#search", "their")
    page.wait_for_selector("#results li")
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if size[0] >= 1280:
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        for name in ("#map", "#heads", "#out", "#in"):
            box = page.locator(name).bounding_box()
            assert box["y"] + box["height"] <= size[1] and box["height"] > 90, name
    drawn = page.evaluate(
        "['map', 'heads'].map((id) => { const e = document.getElementById(id);"
        "return e.querySelector('svg').clientWidth - e.clientWidth; })"
    )
    assert drawn == [0, 0]
    smallest = page.eval_on_selector_all(
        "main *", "list => Math.min(...list.map((e) => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= (10 if size[0] < 2000 else 13)


def test_controls_have_names_and_an_order(files, open_page):
    _, path, _ = files
    page = open_page(path)
    for element in page.locator("button, select, input").all():
        name = element.evaluate(
            "e => e.getAttribute('aria-label') || e.textContent.trim()"
            " || [...(e.labels ?? [])].map((l) => l.textContent).join()"
        )
        assert name, element.evaluate("e => e.outerHTML")
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    wanted = ["help-button", "theme-button", "layer", "head", "mask", "search", "measure", "map"]
    assert [order.index(name) for name in wanted] == sorted(order.index(name) for name in wanted)


def test_a_trace_without_text_or_masks_or_mass(tmp_path, open_page):
    with Writer(tmp_path / "t.parquet", Layout(16, 32, "score"), model="<i>") as writer:
        writer.begin([0], [256])
        index = np.arange(16)[:, None] // 2 - np.arange(3)
        weight = np.linspace(-5, 5, 48, dtype=np.float32).reshape(1, 1, 16, 3)
        writer.append(4, np.maximum(index, -1).astype(np.int32)[None, None], weight)
    write_page(tmp_path / "t.parquet", tmp_path / "t.html")
    page = open_page(tmp_path / "t.html")
    assert page.inner_text("h1") == "<i>"
    values, _ = cells(page)
    wanted = np.full((16, 8), np.nan)
    for edge in read(tmp_path / "t.parquet").edges(4, 0).to_pylist():
        wanted[edge["q_block"], edge["k_block"]] = edge["weight"]
    np.testing.assert_allclose(values, wanted, atol=0.021)
    assert "no text" in page.inner_text("#cards") and page.locator("#search").is_disabled()
    assert not page.locator("#mask-field").is_visible()


def test_a_million_tokens_stay_light(tmp_path, open_page):
    needle = synthesize(tmp_path / "t.parquet", tokens=1 << 20, layers=2, heads=2, top_k=8)
    trace = read(tmp_path / "t.parquet")
    with Writer(tmp_path / "mask.parquet", Layout(64, 64, "mass")) as writer:
        writer.begin([0], [1 << 20])
        for layer in (0, 1):  # keeps nothing but the first block
            index = np.zeros((1, 2, 1 << 14, 1), np.int32)
            writer.append(layer, index, np.ones(index.shape, np.float32))
    masks = {"sink": tmp_path / "mask.parquet"}
    assert write_page(trace, tmp_path / "t.html", limit_mb=8, masks=masks) <= 8e6
    started = time.perf_counter()
    page = open_page(tmp_path / "t.html", fragment="#layer=1&head=1")
    assert time.perf_counter() - started < LOAD_SECONDS
    values, place = cells(page)
    grid = page.evaluate("meta.grid")
    assert place["dx"] == grid["kStep"] > 1 and values.shape == (grid["rows"], grid["columns"])
    oracle = trace.heatmap(1, 1, rows=grid["rows"], columns=grid["columns"])
    mean = oracle / (64 * grid["qStep"])
    np.testing.assert_allclose(10 ** np.nan_to_num(values, nan=-99), mean, rtol=0.034, atol=1e-6)
    page.select_option("#mask", "0")
    until(page, "document.getElementById('map').data.length === 4")
    kept, _ = cells(page)
    missed, _ = cells(page, place=1)
    np.testing.assert_array_equal(np.isnan(kept[:, 1:]), True)
    np.testing.assert_array_equal(missed[:, 1:], values[:, 1:])
    page.select_option("#mask", "none")
    page.fill("#search", "special magic number")
    page.wait_for_selector("#results li")
    settled(page)
    page.click("#zoom-block")
    until(page, "map.view().x[1] - map.view().x[0] === 32")
    settled(page)
    assert f"Block {needle:,}" in page.inner_text("#cards h2")
    row = trace.dense(1, (needle, needle + 1))[1, 0]
    assert listed(page, "out") == np.argsort(-row)[: page.evaluate("meta.keep")].tolist()
    page.click("#zoom-reset")
    page.fill("#search", "the")
    until(page, "document.querySelectorAll('#results li').length === 100")
    settled(page)
    assert page.inner_text("#search-status") == f"match 1 of {len(trace.find('the')):,}"
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
