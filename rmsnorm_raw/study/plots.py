"""The report's plots, as SVG: from plain numbers to text, the same text on every machine.

Every plot is :data:`WIDTH` units wide, the width of a phone, so that its text can be read there; a
wider screen scales it. Colours are the CSS variables of :mod:`.theme`; series differ in the shape
of their marks too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rmsnorm_raw.study.theme import THEME, channels, contrast

WIDTH = 360
#: estimated width of a character, in font sizes; generous, for fonts differ
CHAR = 0.6

STYLES = 8
#: corners of a mark, in radii: a circle, square, triangle, diamond, triangle downwards
SHAPES = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0.0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
    ((0.0, -1.4), (1.2, 0.0), (0.0, 1.4), (-1.2, 0.0)),
    ((0.0, 1.3), (1.2, -0.9), (-1.2, -0.9)),
)
#: of a heat map, from 0 to 100 %, the same in both themes; text on it is black or white
HEAT = ("#f3e3d3", "#e9c49a", "#d79a5b", "#9a6a52", "#4f5a8a", "#1c3f94")


#: of all plots; a page has it once, a file of its own carries it
PLOT_STYLE = (
    ".plot text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:var(--ink)}\n"
    ".plot .soft{fill:var(--soft)}.plot .grid{stroke:var(--line);stroke-width:1}\n"
    ".plot .halo{stroke:var(--bg);stroke-width:3;paint-order:stroke;stroke-linejoin:round}\n"
    + "".join(
        f".plot .f{i}{{fill:var(--s{i})}}.plot .l{i}{{stroke:var(--s{i});fill:none;"
        "stroke-width:1.5}\n"
        for i in range(STYLES)
    )
    + "".join(
        f".plot .{name}{{stroke:var(--{name});fill:none;stroke-width:2}}"
        f".plot .fill-{name}{{fill:var(--{name})}}\n"
        for name in ("good", "bad", "same")
    )
)


@dataclass(frozen=True, slots=True)
class Plot:
    """A finished plot.

    Attributes:
        name: of its file and its element.
        title: what it shows.
        body: the elements.
        height: of the drawing, which is :data:`WIDTH` wide.
    """

    name: str
    title: str
    body: str
    height: float

    @property
    def inline(self) -> str:
        """For a page that has the styles."""
        return self._svg("")

    @property
    def file(self) -> str:
        """A file of its own, light or dark as its reader asks."""
        ground = '<rect width="100%" height="100%" fill="var(--bg)"/>'
        size = f' xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}"'
        return self._svg(size, f"<style>{THEME}{PLOT_STYLE}</style>{ground}") + "\n"

    def _svg(self, attributes: str, head: str = "") -> str:
        box = f"0 0 {WIDTH} {number(self.height)}"
        return (
            f'<svg{attributes} class="plot" id="plot-{self.name}" role="img" viewBox="{box}" '
            f'aria-labelledby="title-{self.name}">'
            f'<title id="title-{self.name}">{escape(self.title)}</title>{head}{self.body}</svg>'
        )


@dataclass(slots=True)
class _Drawing:
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 11,
        *,
        anchor: str = "start",
        css: str = "",
        turn: float = 0,
    ) -> None:
        at = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
        more = f' text-anchor="{anchor}"' if anchor != "start" else ""
        more += f' class="{css}"' if css else ""
        more += f' transform="rotate({turn:g} {number(x)} {number(y)})"' if turn else ""
        self.parts.append(f"<text {at}{more}>{escape(words)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "grid") -> None:
        ends = zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2), strict=True)
        at = " ".join(f'{name}="{number(value)}"' for name, value in ends)
        self.parts.append(f'<line {at} class="{css}"/>')

    def mark(self, x: float, y: float, style: int, title: str = "", r: float = 3.2) -> None:
        """A mark whose shape goes with the style."""
        corners = SHAPES[style % len(SHAPES)]
        if corners:
            points = " ".join(f"{number(x + r * dx)},{number(y + r * dy)}" for dx, dy in corners)
            tag, at = "polygon", f'points="{points}"'
        else:
            tag, at = "circle", f'cx="{number(x)}" cy="{number(y)}" r="{number(r)}"'
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<{tag} {at} class="f{style}">{inner}</{tag}>')

    def legend(self, names: Sequence[tuple[str, int]], y: float) -> float:
        """Marks and names, in as many rows as they need; the height below them."""
        x = 6.0
        for name, style in names:
            width = 16 + len(name) * 10.5 * CHAR + 8
            if x + width > WIDTH:
                x, y = 6.0, y + 16
            self.mark(x + 4, y - 3.5, style)
            self.text(x + 12, y, name, 10.5)
            x += width
        return y + 8

    def plot(self, name: str, title: str, height: float) -> Plot:
        return Plot(name, title, "\n".join(self.parts), height)


def number(value: float) -> str:
    """A coordinate: two digits at most, no trailing zeros, no minus before a zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def curves(
    name: str,
    title: str,
    columns: Sequence[str],
    series: Sequence[tuple[str, int, Sequence[float | None]]],
    unit: str,
) -> Plot:
    """A line a series over columns; numbers of the first series stand beside it.

    Args:
        columns: the shapes.
        series: (name, style, a value a column or None), at least one value in all.
        unit: what the values are, above the axis.
    """
    drawing = _Drawing()
    top = drawing.legend([(label, style) for label, style, _ in series], 14) + 22
    drawing.text(2, top - 12, unit, 10, css="soft")
    left, right, height = 30.0, WIDTH - 14.0, 190.0
    highest = max(v for _, _, values in series for v in values if v is not None)
    ceiling, ticks = _axis(highest)
    step = (right - left) / max(1, len(columns))

    def at(column: int, value: float) -> tuple[float, float]:
        return left + (column + 0.5) * step, top + height * (1 - value / ceiling)

    for tick in ticks:
        y = at(0, tick)[1]
        drawing.line(left, y, right, y)
        drawing.text(left - 4, y + 3.5, str(tick), 10, anchor="end", css="soft")
    for index, column in enumerate(columns):
        x = at(index, 0)[0] + 3
        drawing.text(x, top + height + 14, column, 10, anchor="end", turn=-55)
    for label, style, values in reversed(series):
        points = [None if v is None else at(i, v) for i, v in enumerate(values)]
        for one, other in itertools.pairwise(points):
            if one and other:  # no line over a column without a value
                drawing.line(*one, *other, f"l{style}")
        for point, value, column in zip(points, values, columns, strict=True):
            if point:
                drawing.mark(*point, style, f"{label}, {column}: {value:.2f}")
    numbered = [(i, v) for i, v in enumerate(series[0][2]) if v is not None]
    every = math.ceil(26 / step)  # as many as there is room for, from the last one on
    for index, first in numbered[::-every]:
        x, y = at(index, first)
        drawing.text(x, y - 7, f"{first:.1f}", 9.5, anchor="middle", css="halo")
    longest = max(len(column) for column in columns) * 10 * CHAR
    return drawing.plot(name, title, top + height + 20 + longest * math.sin(math.radians(55)))


def dumbbells(
    name: str,
    title: str,
    rows: Sequence[tuple[str, float, float, float]],
    ends: tuple[str, str],
    unit: str,
    noise_pct: float,
) -> Plot:
    """Two values a row and the line between them, green where the second gained.

    Args:
        rows: (name, first value, second value, speed of the second over the first).
        ends: what the two values are.
        unit: of both.
        noise_pct: changes of speed within it are neither gain nor loss.
    """
    drawing = _Drawing()
    top = drawing.legend([(ends[0], 7), (ends[1], 0)], 14) + 24
    drawing.text(2, top - 14, f"{unit}; change of speed at the right", 10, css="soft")
    left, right, step = 130.0, WIDTH - 56.0, 15.0
    highest = max(max(first, second) for _, first, second, _ in rows)
    ceiling, ticks = _axis(highest)
    bottom = top + step * len(rows)

    def at(value: float) -> float:
        return left + (right - left) * value / ceiling

    for tick in ticks:
        drawing.line(at(tick), top - 4, at(tick), bottom)
        drawing.text(at(tick), bottom + 12, str(tick), 10, anchor="middle", css="soft")
    for index, (label, first, second, ratio) in enumerate(rows):
        y = top + step * (index + 0.5)
        kind = change(ratio, noise_pct)
        drawing.text(left - 6, y + 3.5, label, 10, anchor="end")
        drawing.line(at(first), y, at(second), y, kind)
        drawing.mark(at(first), y, 7, f"{label}, {ends[0]}: {first:.2f}", 2.6)
        drawing.mark(at(second), y, 0, f"{label}, {ends[1]}: {second:.2f}", 2.8)
        css = f"fill-{kind}"
        drawing.text(WIDTH - 4, y + 3.5, f"{100 * ratio - 100:+.1f} %", 10, anchor="end", css=css)
    return drawing.plot(name, title, bottom + 20)


def _axis(highest: float) -> tuple[int, range]:
    """Where an axis from 0 ends, and its ticks: every 20, or as many times 20 as keeps them few."""
    ceiling = 20 * math.ceil(max(highest, 1e-9) / 20)
    return ceiling, range(0, ceiling + 1, 20 * math.ceil(ceiling / 200))


def change(ratio: float, noise_pct: float) -> str:
    """Of a ratio of speeds: "good", "bad" or "same"; a ratio and its inverse mirror each other."""
    upper = 1 + noise_pct / 100
    return "good" if ratio > upper else "bad" if ratio < 1 / upper else "same"


def heat_map(
    name: str,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
) -> Plot:
    """Percentages as colours with their numbers; a row without a value has a dash there."""
    drawing = _Drawing()
    left, top, height = 66.0, 34.0, 30.0
    step = (WIDTH - left) / len(columns)
    for column, label in enumerate(columns):
        words = label.split()
        for line, word in enumerate(words):
            y = top - 6 - 12 * (len(words) - 1 - line)
            size = min(10.0, step / len(word) / CHAR)
            drawing.text(left + (column + 0.5) * step, y, word, size, anchor="middle")
    for row, label in enumerate(rows):
        y = top + row * height
        drawing.text(left - 6, y + height / 2 + 4, label, 10.5, anchor="end")
        for column, value in enumerate(values[row]):
            x = left + column * step
            if value is None:
                drawing.text(x + step / 2, y + height / 2 + 4, "–", 11, anchor="middle")
                continue
            colour = _blend(value)
            ink = "#000000" if contrast("#000000", colour) >= 4.5 else "#ffffff"
            drawing.parts.append(
                f'<g class="cell"><rect x="{number(x + 1)}" y="{number(y + 1)}" '
                f'width="{number(step - 2)}" height="{number(height - 2)}" fill="{colour}"/>'
                f'<text x="{number(x + step / 2)}" y="{number(y + height / 2 + 4)}" '
                f'font-size="11" text-anchor="middle" style="fill:{ink}">{value:.1f}</text></g>'
            )
    return drawing.plot(name, title, top + height * len(rows) + 6)


def _blend(pct: float) -> str:
    """The colour of a percentage: between neighbours of :data:`HEAT`."""
    place = min(max(pct, 0.0), 100.0) / 100 * (len(HEAT) - 1)
    index = min(int(place), len(HEAT) - 2)
    low, high = (channels(colour) for colour in HEAT[index : index + 2])
    mixed = (round(a + (b - a) * (place - index)) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def ratio_strips(
    name: str,
    title: str,
    rows: Sequence[tuple[str, int, Sequence[tuple[str, float]], float]],
    unit: str,
) -> Plot:
    """Ratios as dots on a logarithmic axis, a row a series, with their geometric mean.

    Args:
        rows: (name, style, (cell, ratio) for each dot, geometric mean).
        unit: what the ratio is.
    """
    drawing = _Drawing()
    left, right, top, step = 92.0, WIDTH - 52.0, 36.0, 40.0
    drawing.text(2, 14, f"{unit}; geometric mean at the right", 10, css="soft")
    ratios = [ratio for _, _, dots, _ in rows for _, ratio in dots]
    low, high = math.log(min(0.9, *ratios)), math.log(max(1.25, *ratios) * 1.05)
    bottom = top + step * len(rows)

    def at(ratio: float) -> float:
        return left + (right - left) * (math.log(ratio) - low) / (high - low)

    last = -math.inf
    for tick in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0):
        if low <= math.log(tick) <= high and at(tick) - last > 24:
            last = at(tick)
            drawing.line(last, top - 10, last, bottom, "same" if tick == 1 else "grid")
            drawing.text(last, bottom + 13, f"{tick:g}", 10, anchor="middle", css="soft")
    for index, (label, style, dots, mean) in enumerate(rows):
        y = top + step * (index + 0.5)
        drawing.text(left - 6, y + 4, label, 10.5, anchor="end")
        for place, (cell, ratio) in enumerate(dots):
            offset = (place * 7 % 11 - 5) * 2.2  # spread, so that equal ratios can be told apart
            drawing.mark(at(ratio), y + offset, style, f"{label}, {cell}: {ratio:.3f}", 2.2)
        drawing.line(at(mean), y - 17, at(mean), y + 17, f"l{style}")
        drawing.text(WIDTH - 4, y + 4, f"{mean:.3f}", 11, anchor="end")
    return drawing.plot(name, title, bottom + 20)


def bars(name: str, title: str, rows: Sequence[tuple[str, int, float, str]], unit: str) -> Plot:
    """Horizontal bars from 0, each with its number and a note behind it."""
    drawing = _Drawing()
    drawing.text(2, 14, unit, 10, css="soft")
    left, right, top, step = 92.0, WIDTH - 118.0, 22.0, 22.0
    highest = max(value for _, _, value, _ in rows)
    for index, (label, style, value, note) in enumerate(rows):
        y = top + step * index
        width = (right - left) * value / highest
        drawing.text(left - 6, y + 14, label, 10.5, anchor="end")
        drawing.parts.append(
            f'<rect x="{number(left)}" y="{number(y + 3)}" width="{number(width)}" '
            f'height="{number(step - 6)}" class="f{style}"/>'
        )
        drawing.text(left + width + 5, y + 14, f"{value:.1f} {note}".strip(), 10.5)
    return drawing.plot(name, title, top + step * len(rows) + 6)


def intervals(
    name: str,
    title: str,
    rows: Sequence[tuple[str, float, tuple[float, float] | None, str, str]],
    unit: str,
) -> Plot:
    """Ratios of speeds with their intervals about 1, and a word a row.

    Args:
        rows: (name, ratio, its interval or None, "good", "bad" or "same", the word).
        unit: what the ratio is.
    """
    drawing = _Drawing()
    drawing.text(2, 14, unit, 10, css="soft")
    left, right, top, step = 130.0, WIDTH - 72.0, 30.0, 15.0
    ends = [math.log(v) for _, ratio, pair, _, _ in rows for v in (ratio, *(pair or ()))]
    reach = max(math.log(1.02), *(abs(end) for end in ends))
    bottom = top + step * len(rows)

    def at(log: float) -> float:
        return (left + right) / 2 + (right - left) / 2 * log / reach

    for tick in (-reach, 0.0, reach):
        drawing.line(at(tick), top - 4, at(tick), bottom)
        drawing.text(
            at(tick), bottom + 12, f"{math.exp(tick):.3f}", 10, anchor="middle", css="soft"
        )
    for index, (label, ratio, pair, kind, word) in enumerate(rows):
        y = top + step * (index + 0.5)
        drawing.text(left - 6, y + 3.5, label, 10, anchor="end")
        if pair:
            drawing.line(at(math.log(pair[0])), y, at(math.log(pair[1])), y, kind)
        drawing.parts.append(
            f'<circle cx="{number(at(math.log(ratio)))}" cy="{number(y)}" r="2.6" '
            f'class="fill-{kind}"><title>{escape(label)}: {ratio:.4f} {word}</title></circle>'
        )
        drawing.text(WIDTH - 4, y + 3.5, word, 10, anchor="end", css=f"fill-{kind}")
    return drawing.plot(name, title, bottom + 20)
