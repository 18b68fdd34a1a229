"""What bench/schematics.py draws on: a panel with text, boxes, arrows and a legend, as SVG."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEGEND_Y = 720, 268, 248
PANEL, EDGE, WHITE = "#f6f7fb", "#d5d9e8", "#ffffff"
INK, QUIET, DECIDES = "#1f2333", "#4a5068", "#8a5200"  # text: plain, of less weight, beside amber
EXACT, ROUGH, MEASURED, UNREAD = "#4051b5", "#b3bdec", "#f0a020", "#e1e4ee"
HATCH = "url(#estimated)"
OUTLINE = {EXACT: "#2c3a8c", ROUGH: "#8490cf", MEASURED: "#b87400", UNREAD: "#c3c8d8"}
DEFINED = (
    '<defs><pattern id="estimated" width="5" height="5" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{WHITE}"/>'
    f'<rect width="2" height="5" fill="{ROUGH}"/></pattern></defs>'
)
Point = tuple[float, float]


def path_of(points: Sequence[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


class Picture:
    """A panel with a heading, and the shapes that were added to it."""

    def __init__(self, draw: Callable[[Picture], None]) -> None:
        self.name = draw.__name__
        self.heading, _, text = (inspect.getdoc(draw) or "").partition("\n\n")
        self.description = " ".join(text.split())
        self.parts: list[str] = []
        self.text(24, 32, self.name, EXACT, size=17, bold=True)
        self.text(696, 32, self.heading, size=14, anchor="end")
        draw(self)

    def text(self, x, y, text, color=INK, anchor="start", size=13, bold=False, step=17) -> None:
        """Lines of text, the first one at y."""
        if not text:
            return
        look = f'font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        look += ' font-weight="bold"' if bold else ""
        for i, line in enumerate(text.split("\n")):
            self.parts.append(f'<text x="{x:g}" y="{y + step * i:g}" {look}>{escape(line)}</text>')

    def box(self, x, y, width, height, fill, label="", bold=False, opacity=1.0) -> None:
        """A rectangle with a label in its middle."""
        edge = OUTLINE.get(fill, "#a9b0c8")
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" '
            f'fill-opacity="{opacity:g}" stroke="{edge}" stroke-width="0.8"/>'
        )
        if label:
            ink = WHITE if fill == EXACT else INK
            self.text(x + width / 2, y + height / 2 + 5, label, ink, "middle", bold=bold)

    def line(self, *points: Point, color=QUIET, width=1.5, dash="none") -> None:
        self.parts.append(
            f'<polyline points="{path_of(points)}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}" stroke-dasharray="{dash}"/>'
        )

    def shape(self, *points: Point, fill: str) -> None:
        edge = OUTLINE.get(fill, QUIET)
        self.parts.append(f'<polygon points="{path_of(points)}" fill="{fill}" stroke="{edge}"/>')

    def arrow(self, *points: Point, color=QUIET) -> None:
        """A line with a head at its end. The last stretch is level or upright."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        back = (x - 7 * dx, y - 7 * dy)
        self.line(*points[:-1], back, color=color)
        sides = [f"{back[0] + 4 * dy * s:g},{back[1] + 4 * dx * s:g}" for s in (1, -1)]
        self.parts.append(f'<polygon points="{x:g},{y:g} {" ".join(sides)}" fill="{color}"/>')

    def bracket(self, x0, x1, y, label="") -> None:
        """Marks what lies between x0 and x1 above, with a label below."""
        self.line((x0, y - 5), (x0, y), (x1, y), (x1, y - 5), width=1.2)
        self.text((x0 + x1) / 2, y + 15, label, QUIET, "middle")

    def strip(self, x, y, step, height, fills: Sequence[str]) -> None:
        """A row of cells, side by side."""
        for i, fill in enumerate(fills):
            self.box(x + i * step, y, step - (2 if step > 12 else 1), height, fill)

    def legend(self, *pairs: str, note="") -> None:
        """Colours and what each means, in turn, and a note at the right."""
        self.text(696, LEGEND_Y, note, anchor="end")
        x = 24.0
        for fill, meaning in zip(pairs[::2], pairs[1::2], strict=True):
            self.box(x, LEGEND_Y - 11, 13, 13, fill)
            self.text(x + 19, LEGEND_Y, meaning, QUIET)
            x += 40 + 6.9 * len(meaning)

    def svg(self) -> str:
        title, described = f"how-{self.name}-title", f"how-{self.name}-desc"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" role="img" '
            f'aria-labelledby="{title} {described}">',
            f'<title id="{title}">{escape(self.name)}: {escape(self.heading)}</title>',
            f'<desc id="{described}">{escape(self.description)}</desc>',
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="14" '
            f'fill="{PANEL}" stroke="{EDGE}"/>',
        )
        defined = [DEFINED] if any(HATCH in part for part in self.parts) else []
        return "\n".join((*head, *defined, *self.parts, "</svg>\n"))
