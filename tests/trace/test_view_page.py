"""The viewer's page in headless Chromium: what it shows is what the trace says, by mouse and by
keyboard, and nothing leaves it."""

import numpy as np
import pytest
from view_page import (
    HEADS,
    LAYERS,
    TOKENS,
    assert_shows,
    cells,
    choice,
    listed,
    settled,
    shares,
    until,
)


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


def on_screen(page, q, k):
    """Where a block pair is drawn."""
    return page.evaluate(
        """([q, k]) => { const e = document.getElementById("map"), l = e._fullLayout;
        const b = e.getBoundingClientRect();
        return [b.left + l.xaxis._offset + l.xaxis.d2p(k + 0.5),
                b.top + l.yaxis._offset + l.yaxis.d2p(q + 0.5)]; }""",
        [q, k],
    )


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
    at = on_screen(page, q, k)
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
    until(page, f"map.view().x[0] === {k + 0.5 - 16}")
    assert page.evaluate("[app.shown().q, app.shown().k]") == [q, k]
    # an edge of the list leads on
    page.click(f"#out button[data-block='{heaviest}']")
    settled(page)
    assert page.get_attribute("#out [aria-current]", "data-block") == str(heaviest)


def press(page, place, at_ms):
    """A pointer goes down on the map, so many milliseconds after the page was opened."""
    page.evaluate(
        """([clientX, clientY, ms]) => {
        const event = new PointerEvent("pointerdown", { clientX, clientY });
        Object.defineProperty(event, "timeStamp", { value: ms });
        document.getElementById("map").dispatchEvent(event); }""",
        [*place, at_ms],
    )


FIRST_COUNTS = [[0], [0, 100], [0, 100, 200], [0, 400, 800]]


@pytest.mark.parametrize(
    ("presses", "first_counts"),
    [*((presses, True) for presses in FIRST_COUNTS), ([0, 1000], False)],
)
def test_a_click_that_comes_late_selects_what_was_pressed(files, open_page, presses, first_counts):
    """Plotly says "click" after a double click has moved the map, if the machine is slow. Of
    presses in quick succession the first counts, also of a click just before a double click."""
    _, path, _ = files
    page = open_page(path, fragment="#layer=1&head=2&q=300&k=100")
    page.click("#zoom-block")
    settled(page)
    place = on_screen(page, 295, 91)
    press(page, place, presses[0])
    page.evaluate("map.pan(0.25, -0.25)")
    settled(page)
    assert on_screen(page, 295, 91) != place
    for at_ms in presses[1:]:
        press(page, place, at_ms)
    page.evaluate("document.getElementById('map').emit('plotly_click', {})")
    found = page.evaluate("[app.shown().q, app.shown().k]")
    assert (found == [295, 91]) is first_counts


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
    page.select_option("#measure", "listed")
    until(page, "document.getElementById('heads').dataset.measure === 'listed'")
    sizes = np.stack([trace.list_sizes(layer).mean(1) for layer in trace.layers])
    i, j = np.unravel_index(sizes.argmax(), sizes.shape)
    best = f"layer {trace.layers[i]}, head {j}: {sizes.max():.1f}"
    assert best in page.get_attribute("#heads", "aria-label")
    assert f"lists of {sizes.mean():.1f} blocks on average" in page.inner_text("body")
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
