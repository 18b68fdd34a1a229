"""bench/schematics.py: a picture of each method, and the committed ones are its own."""

import importlib
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnplug.policies import names

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "img"
PICTURED = sorted(path.stem.removeprefix("how-") for path in IMAGES.glob("how-*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def schematics(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("schematics")
    for name in ("schematics", "_schematic_panel"):
        sys.modules.pop(name, None)


def test_the_committed_pictures_are_what_the_script_writes(schematics, tmp_path):
    schematics.main(["--out", str(tmp_path)])
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text("utf-8") for path in IMAGES.glob("how-*.svg")}
    assert sorted(kept) == sorted(drawn)
    stale = [name for name in drawn if kept[name] != drawn[name]]
    assert not stale, f"python bench/schematics.py; stale: {stale}"


def test_each_method_with_a_page_has_a_picture():
    pages = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")}
    methods = set(names()) & pages
    assert "trained" in methods and "latent" not in methods  # latent is an op, which is no policy
    assert methods == set(PICTURED)


@pytest.mark.parametrize("name", PICTURED)
def test_a_picture_says_what_it_shows_in_letters_that_can_be_read(name):
    picture = ElementTree.fromstring((IMAGES / f"how-{name}.svg").read_text("utf-8"))
    title, described = picture.find(f"{SVG}title"), picture.find(f"{SVG}desc")
    assert title.text.startswith(f"{name}: ") and described.text
    assert picture.get("aria-labelledby") == f"{title.get('id')} {described.get('id')}"
    assert min(int(text.get("font-size")) for text in picture.iter(f"{SVG}text")) >= 13
