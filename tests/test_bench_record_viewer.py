"""bench/record_viewer.py: the committed picture is what a README can bear, and its helpers hold."""

import importlib
import itertools
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageSequence

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "img" / "viewer.gif"
BENCHES = ("record_viewer", "_reel", "trace_view")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module
    for name in BENCHES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def shown():
    """Every frame of the committed picture as it is seen, with its milliseconds."""
    with Image.open(PICTURE) as picture:
        frames = ImageSequence.Iterator(picture)
        return [(frame.convert("RGB"), frame.info["duration"]) for frame in frames]


def image(colour, size=(4, 3)):
    return Image.new("RGB", size, colour)


def test_the_picture_is_small_and_goes_on_for_ever():
    assert PICTURE.stat().st_size <= 1.5e6
    with Image.open(PICTURE) as picture:
        assert picture.format == "GIF" and picture.width <= 900 and picture.height <= 700
        assert picture.info["loop"] == 0


def test_the_picture_tells_its_story_in_ten_to_fifteen_seconds(shown):
    durations = [duration for _, duration in shown]
    assert 10_000 <= sum(durations) <= 15_000
    assert min(durations) >= 100  # ten frames a second, no more
    assert max(durations) >= 1000  # what is to be read stands still
    assert 30 <= len(shown) <= 150


def test_the_picture_does_not_flash(shown):
    area = shown[0][0].width * shown[0][0].height
    for (before, _), (after, _) in itertools.pairwise(shown):
        change = ImageChops.difference(before, after).convert("L").point(lambda by: 255 * (by > 25))
        assert change.histogram()[255] < 0.3 * area
    background = [frame.getpixel((frame.width // 2, 78)) for frame, _ in shown]
    assert len(set(background)) == 1 and min(background[0]) > 220  # light, and still


def test_a_frame_like_the_one_before_lengthens_it(bench):
    frames = [(image("red"), 100), (image("red"), 250), (image("blue"), 100), (image("red"), 100)]
    found = bench("_reel").joined(frames)
    assert [duration for _, duration in found] == [350, 100, 100]
    assert found[0][0].getpixel((0, 0)) == found[2][0].getpixel((0, 0)) == (255, 0, 0)


def test_the_pointer_goes_all_the_way_and_is_slow_at_both_ends(bench):
    places = bench("_reel").way((0, 10), (100, 10), 5)
    assert len(places) == 5 and places[-1] == (100, 10)
    steps = [b - a for (a, _), (b, _) in itertools.pairwise([(0, 10), *places])]
    assert min(steps) > 0 and max(steps) == steps[2] and steps[0] == pytest.approx(steps[-1])
    assert bench("_reel").way((3, 4), (5, 6), 1) == [(5, 6)]


def test_a_written_picture_has_its_frames_durations_and_colours(bench, tmp_path):
    reel = bench("_reel")
    dotted = image("white", (40, 40))
    dotted.putpixel((7, 7), (0xB0, 0x00, 0x5E))  # a single pixel of a colour that matters
    frames = [(image("white", (40, 40)), 300), (dotted, 100), (image("#0c5fae", (40, 40)), 1200)]
    reel.write_gif(frames, tmp_path / "some.gif")
    with Image.open(tmp_path / "some.gif") as picture:
        found = [(f.convert("RGB"), f.info["duration"]) for f in ImageSequence.Iterator(picture)]
        assert picture.info["loop"] == 0
    assert [duration for _, duration in found] == [300, 100, 1200]
    for (was, _), (now, _) in zip(frames, found, strict=True):
        extremes = ImageChops.difference(was, now).getextrema()
        assert max(high for _, high in extremes) <= 4


def test_the_prompt_ends_where_the_answer_would_begin(bench):
    text = (
        "The special magic number for Rome is 12345.\nWhat is the special magic number for Rome?"
        " The special magic number for Rome is"
    )
    question = bench("record_viewer").asked(text)
    assert question.endswith("magic number for Rome?\n") and "12345" in question


def test_a_page_needs_its_number(bench, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench("record_viewer").main(["--page", str(tmp_path / "page.html")])
    assert "go together" in capsys.readouterr().err
