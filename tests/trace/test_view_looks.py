"""The viewer's page in headless Chromium: dark and light, small and large, with little in it."""

import time

import numpy as np
import pytest
from view_page import LOAD_SECONDS, cells, listed, settled, until

from attnplug.trace import Layout, Writer, read, synthesize
from attnplug.trace.view import write_page

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


@pytest.mark.parametrize("size", [(1280, 720), (2560, 1440), (800, 900), (390, 844)])
def test_everything_has_its_place(files, open_page, size):
    _, path, _ = files
    page = open_page(path, *size, fragment="#q=300&k=100&mask=momo")
    page.fill("#search", "their")
    page.wait_for_selector("#results li")
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("header").bounding_box()["height"] < 90  # on a phone, too
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
    page.set_viewport_size({"width": 1280 if size[0] < 1280 else 390, "height": size[1]})
    assert page.locator("#facts .wide").is_visible() == (size[0] < 1280)  # a window is resized


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
