"""Records a page of the trace viewer as an endless GIF: a mouse that one sees, and a line of words.

The pointer, the words above the page and its narrower columns are this file's, the rest is the
viewer as it is. Frames that are alike become one that stays longer, and all have one palette."""

import io
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageChops, ImageColor
from playwright.sync_api import Page

FRAME = 100  # milliseconds
WIDTH, HEIGHT = 900, 600
COLOURS, EXACT = 255, 64
# Little of a frame has them, and they matter: the selected cell, the matches.
KEPT = ("#b0005e", "#0a7a3c")
STYLE = """
html, body { block-size: 100% !important; overflow: hidden; }
main { grid-template-columns: 13rem minmax(0, 1fr) 20rem !important; gap: 8px; padding: 8px; }
main > section { overflow: hidden; }
header { padding: 0.3rem 1rem; }
header .actions { display: none; }
#facts { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.side { padding: 0.6rem; gap: 0.4rem; }
#heads { margin-inline: -6px; }
.field:not(.heads-field) { grid-template-columns: 2.7rem 1fr; }
.step button { padding: 0.2em 0.5em; }
.map-bar { gap: 0.3rem; }
.map-bar .actions { gap: 0.25rem; }
.map-bar button, .card button { padding: 0.2em 0.4em; white-space: nowrap; }
#shown { white-space: nowrap; }
#map, #heads { min-block-size: 0 !important; }
.lists { grid-template-rows: 1.25fr 1fr !important; }
#told { background: var(--accent); color: #fff; font-size: 17px; font-weight: 600;
  padding: 7px 16px; min-block-size: 40px; }
#pointer { position: fixed; z-index: 9; pointer-events: none; margin: -2px 0 0 -3px; }
#pointer circle { visibility: hidden; }
#pointer.down circle { visibility: visible; }
"""
DRESS = """(style) => {
  document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
  document.body.prepend(Object.assign(document.createElement("p"), { id: "told" }));
  document.body.insertAdjacentHTML("beforeend", `<svg id="pointer" width="40" height="40">
    <circle cx="3" cy="2" r="13" fill="#b0005e" opacity="0.35"/>
    <path d="M3 2v20l5-4.5 3.2 7.5 3.6-1.6-3.2-7.2 6.7-.4z" fill="#111" stroke="#fff"
      stroke-width="1.6"/></svg>`);
}"""
# Where a cell of the map or of the heads is on the screen.
PLACE = """([id, x, y]) => {
  const element = document.getElementById(id);
  const { xaxis, yaxis } = element._fullLayout;
  const box = element.getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.d2p(x), box.top + yaxis._offset + yaxis.d2p(y)];
}"""


class Reel:
    """A page that is being recorded: its frames, and where the pointer is."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[tuple[Image.Image, int]] = []
        page.evaluate(DRESS, STYLE)
        self._move((WIDTH * 0.5, HEIGHT * 0.3))

    def hold(self, seconds: float) -> None:
        """The page at rest, for so long."""
        self.settle()
        self._take(round(1000 * seconds))

    def settle(self) -> None:
        """Wait until the page shows what was chosen."""
        self.page.wait_for_timeout(250)
        while self.page.evaluate("map.busy() || app.busy()"):
            self.page.wait_for_timeout(50)

    def tell(self, words: str) -> None:
        """The line above the page."""
        self.page.evaluate("(words) => (told.textContent = words)", words)

    def go(self, place: tuple[float, float], seconds: float = 0.6) -> None:
        """The pointer moves there."""
        for at in way(self.pointer, place, round(1000 * seconds / FRAME)):
            self._move(at)
            self._take(FRAME)

    def click(self) -> None:
        """Where the pointer is; a ring shows it."""
        self.page.wait_for_timeout(700)  # of two clicks in less the page makes a double click
        self.page.evaluate("pointer.classList.add('down')")
        self._take(2 * FRAME)
        self.page.mouse.click(*self.pointer)
        self.page.evaluate("pointer.classList.remove('down')")
        self.settle()
        x, y = self.pointer
        self.page.mouse.move(x + 0.5, y)  # no hand is as still as a script: the page reads on

    def type(self, words: str) -> None:
        """One letter a frame."""
        for letter in words:
            self.page.keyboard.type(letter)
            self._take(FRAME)

    def middle(self, selector: str) -> tuple[float, float]:
        """Of an element of the page."""
        box = self.page.locator(selector).bounding_box()
        assert box is not None, selector
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def cell(self, plot: str, x: float, y: float) -> tuple[float, float]:
        """Where a cell of `map` or `heads` is."""
        x, y = self.page.evaluate(PLACE, [plot, x, y])
        return x, y

    def _move(self, place: tuple[float, float]) -> None:
        self.pointer = place
        self.page.mouse.move(*place)
        style = f"left: {place[0]:.1f}px; top: {place[1]:.1f}px; overflow: visible"
        self.page.evaluate("(style) => pointer.setAttribute('style', style)", style)

    def _take(self, duration: int) -> None:
        shot = Image.open(io.BytesIO(self.page.screenshot()))
        self.frames.append((shot.convert("RGB"), duration))


def way(
    start: tuple[float, float], end: tuple[float, float], steps: int
) -> list[tuple[float, float]]:
    """The pointer's places between the two, the last one `end`; slow at both ends."""
    parts = [(step / steps) ** 2 * (3 - 2 * step / steps) for step in range(1, steps + 1)]
    (x, y), (to_x, to_y) = start, end
    return [(x + (to_x - x) * part, y + (to_y - y) * part) for part in parts]


def joined(frames: Iterable[tuple[Image.Image, int]]) -> list[tuple[Image.Image, int]]:
    """Frames and durations; what looks like the frame before it makes that one longer."""
    found: list[tuple[Image.Image, int]] = []
    for image, duration in frames:
        if found and ImageChops.difference(found[-1][0], image).getbbox() is None:
            found[-1] = (found[-1][0], found[-1][1] + duration)
        else:
            found.append((image, duration))
    return found


def palette(images: list[Image.Image]) -> Image.Image:
    """One for all, so that what stands still does not flicker: the colours of areas as they are,
    and what comes nearest to the many of letters' edges."""
    some = images[:: max(1, len(images) // 12)]
    wide, high = some[0].size
    sheet = Image.new("RGB", (wide, high * len(some)))
    for place, image in enumerate(some):
        sheet.paste(image, (0, place * high))
    counts = sorted(sheet.getcolors(sheet.width * sheet.height) or [], reverse=True)
    exact = [ImageColor.getrgb(colour) for colour in KEPT]
    exact += [colour for _, colour in counts[:EXACT] if colour not in exact]
    mixed = sheet.quantize(COLOURS - len(exact), Image.Quantize.MEDIANCUT).getpalette() or []
    found = Image.new("P", (1, 1))
    found.putpalette([part for colour in exact for part in colour] + mixed)
    return found


def write_gif(frames: list[tuple[Image.Image, int]], out: Path) -> None:
    """An endless GIF of frames and their milliseconds."""
    images, durations = zip(*frames, strict=True)
    shared = palette(list(images))
    first, *rest = [image.quantize(palette=shared, dither=0) for image in images]
    options = dict(duration=list(durations), loop=0, disposal=1, optimize=True)
    first.save(out, save_all=True, append_images=rest, **options)
