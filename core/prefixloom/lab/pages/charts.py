"""Charts: lines, stacked bars and stacked areas as SVG, for a page that is read without a network.

A chart knows numbers and names. It knows no cache, no trace and no policy. Colours are the page's (``STYLE``), which
has a light and a dark set; a series has the colour of its place in the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import pairwise

import attrs

WIDTH, HEIGHT = 860, 340
LEFT, RIGHT, TOP, BOTTOM = 76, 150, 14, 40
LEAST_TOP = 1e-9
"""Values below are drawn as 0."""
COLOURS = 8
"""So many series have a colour of their own; more take them in turn."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #fff; --soft: #5d677b; --line: #d9dee8; --c0: #2563a8;
  --c1: #c2410c; --c2: #15803d; --c3: #7e3fb3; --c4: #b0741a; --c5: #0e7490; --c6: #be185d; --c7: #57606f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --paper: #14171f; --soft: #9aa5ba; --line: #303746;
  --c0: #6ba7e8; --c1: #f0915f; --c2: #63c98a; --c3: #b996e6; --c4: #dcb163; --c5: #59bfd2; --c6: #ee86b3;
  --c7: #a7b0bf; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 900px; padding: 28px 20px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 25px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 6px; }
.soft { color: var(--soft); } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; display: block; min-width: 560px; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg text.soft { fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
""" + "".join(
    f".s{place} {{ stroke: var(--c{place}); }} .f{place} {{ fill: var(--c{place}); }}\n" for place in range(COLOURS)
)


@attrs.frozen
class LineSeries:
    """One line of a chart: its points in the order of x. ``dashed`` lines are limits and not measurements."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_chart(
    title: str,
    series: Sequence[LineSeries],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    *,
    x_title: str = "",
) -> str:
    """Draw lines over a logarithmic x. Each has its name at its right end, and each point its values as a tooltip."""
    xs = sorted({x for each in series for x, _ in each.points})
    ys = [y for each in series for _, y in each.points]
    if not xs:
        return ""
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    top = max(ys) * 1.05
    if top < LEAST_TOP:
        top = 1.0
    ticks = nice_ticks(top)
    top = max(top, ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    out = [_horizontal_grid(ticks, y_text, lambda y: at(xs[0], y)[1])]
    out += _x_labels([(at(x, 0)[0], x_text(x)) for x in xs], x_title)
    ends = [at(*each.points[-1]) for each in series]
    label_ys = spread([y for _, y in ends], 15.0)
    for place, (each, label_y) in enumerate(zip(series, label_ys, strict=True)):
        colour = place % COLOURS
        points = [at(x, y) for x, y in each.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if each.dashed else ""
        out.append(f'<polyline class="s{colour}" fill="none" stroke-width="2"{dash} points="{path}"/>')
        for (x, y), (value, result) in zip(points, each.points, strict=True):
            told = escape(f"{each.name}: {y_text(result)} at {x_text(value)}")
            out.append(f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{told}</title></circle>')
        x = points[-1][0] + 10
        out.append(f'<text class="f{colour}" x="{x:.1f}" y="{label_y + 4:.1f}">{escape(each.name)}</text>')
    return svg(WIDTH, HEIGHT, title, "".join(out))


def stacked_bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    text: Callable[[float], str],
    neutral: Collection[str] = (),
) -> str:
    """Draw one bar a row: its parts side by side, on one scale for all rows.

    A legend explains the parts, of which the ``neutral`` ones are grey.
    """
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    most = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if not most:
        return ""
    left, step = 190, 26
    scale = (WIDTH - left - 16) / most
    coloured = [name for name in names if name not in neutral]
    places = {name: coloured.index(name) % (COLOURS - 1) if name in coloured else COLOURS - 1 for name in names}
    out, down = legend(places)
    for number, (row, parts) in enumerate(rows):
        y, x = down + number * step, float(left)
        out.append(f'<text x="0" y="{y + 15}">{escape(row)}</text>')
        for name, place in places.items():
            width = parts.get(name, 0.0) * scale
            if not width > 0:
                continue
            told = escape(f"{row}, {name}: {text(parts[name])}")
            out.append(
                f'<rect class="f{place}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{step - 6}">'
                f"<title>{told}</title></rect>"
            )
            label = text(parts[name])
            if width > 8 * len(label):
                inside = f'x="{x + 6:.1f}" y="{y + 15}" style="fill: var(--paper)"'
                out.append(f"<text {inside}>{escape(label)}</text>")
            x += width
    return svg(WIDTH, down + len(rows) * step + 4, title, "".join(out))


def stacked_areas(
    title: str,
    times: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    y_unit: float = 1.0,
) -> str:
    """Draw layers on top of each other over a linear x, the first at the bottom. Labels are multiples of ``y_unit``."""
    if len(times) < 2:
        return ""
    totals: list[float] = [sum(values) for values in zip(*layers.values(), strict=True)]
    ticks = nice_ticks(max(totals) or 1.0, y_unit)
    top: float = max(ticks[-1], *totals)
    begin, span = times[0], times[-1] - times[0] or 1.0
    head, down = legend({name: place % COLOURS for place, name in enumerate(layers)})
    height = HEIGHT + down

    def across(t: float) -> float:
        return LEFT + (t - begin) / span * (WIDTH - LEFT - 16)

    def up(value: float) -> float:
        return height - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    out = [*head, _horizontal_grid(ticks, y_text, up, WIDTH - 16)]
    marks = [begin + span * part / 4 for part in range(5)]
    out += _x_labels([(across(t), x_text(t)) for t in marks], "", height)
    below = [0.0] * len(times)
    for place, name in enumerate(layers):
        above = [low + value for low, value in zip(below, layers[name], strict=True)]
        edge = [f"{across(t):.1f},{up(value):.1f}" for t, value in zip(times, above, strict=True)]
        back = [f"{across(t):.1f},{up(value):.1f}" for t, value in zip(times, below, strict=True)][::-1]
        points = " ".join(edge + back)
        out.append(f'<polygon class="f{place % COLOURS}" points="{points}"><title>{escape(name)}</title></polygon>')
        below = above
    return svg(WIDTH, height, title, "".join(out))


def svg(width: float, height: float, title: str, inside: str) -> str:
    return (
        f'<div class="wide"><svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{inside}</svg></div>'
    )


def legend(places: Mapping[str, int]) -> tuple[list[str], int]:
    """Return the names of the parts beside their colours, and the height that this takes."""
    out, x, y = [], 0.0, 0
    for name, place in places.items():
        width = 30 + 6.6 * len(name)
        if x + width > WIDTH:
            x, y = 0.0, y + 20
        out.append(f'<rect class="f{place}" x="{x:.0f}" y="{y + 2}" width="12" height="12"/>')
        out.append(f'<text class="soft" x="{x + 17:.0f}" y="{y + 12}">{escape(name)}</text>')
        x += width
    return out, y + 26


def nice_ticks(top: float, unit: float = 1.0) -> list[float]:
    """Return round multiples of ``unit`` from 0 on, at equal distances, of which the last is about ``top``."""
    step = 10.0 ** math.floor(math.log10(top / unit / 4))
    step *= unit * next(each for each in (1, 2, 2.5, 5, 10) if top / (step * unit * each) <= 5)
    return [step * count for count in range(math.floor(top / step + 1e-9) + 1)]


def spread(places: Sequence[float], apart: float) -> list[float]:
    """Return the places moved as little as a sweep can, so that each two are at least ``apart``; the order stays."""
    order = sorted(range(len(places)), key=lambda number: places[number])
    moved = list(places)
    for before, number in pairwise(order):
        moved[number] = max(moved[number], moved[before] + apart)
    overflow = moved[order[-1]] - (HEIGHT - BOTTOM) if order else 0.0
    if overflow > 0:
        moved[order[-1]] -= overflow
        for after, number in zip(order[::-1], order[-2::-1], strict=False):
            moved[number] = min(moved[number], moved[after] - apart)
    return moved


def _horizontal_grid(
    ticks: Sequence[float], text: Callable[[float], str], up: Callable[[float], float], right: float = WIDTH - RIGHT
) -> str:
    return "".join(
        f'<line class="{"grid" if tick else "axis"}" x1="{LEFT}" x2="{right}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        f'<text class="soft" x="{LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{escape(text(tick))}</text>'
        for tick in ticks
    )


def _x_labels(places: Sequence[tuple[float, str]], title: str, height: float = HEIGHT) -> list[str]:
    """Return labels below the axis, of which those that would touch the one before are left out."""
    out, free = [], -math.inf
    for x, text in places:
        half = 3.6 * len(text)
        if x - half < free:
            continue
        free = x + half + 6
        out.append(
            f'<text class="soft" x="{x:.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>'
        )
    if title:
        middle = (LEFT + WIDTH - RIGHT) / 2
        out.append(f'<text class="soft" x="{middle}" y="{height - 4}" text-anchor="middle">{escape(title)}</text>')
    return out
