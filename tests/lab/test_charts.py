"""Charts: what every picture keeps to, whatever the numbers and the names are."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixloom.lab.pages.charts import LineSeries, line_chart, nice_ticks, spread, stacked_areas, stacked_bars

names = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=12)
amounts = st.just(0.0) | st.floats(1e-6, 1e12)


def elements(chart: str, kind: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(chart).iter() if each.tag.endswith("}" + kind)]


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12))
def test_labels_keep_apart_and_keep_their_order(places: list[float]) -> None:
    moved = spread(places, 15.0)
    order = sorted(range(len(places)), key=lambda number: places[number])
    for before, after in pairwise(order):
        assert moved[after] - moved[before] >= 15.0 - 1e-9


@given(st.floats(1e-6, 1e15), st.sampled_from([1.0, 1024.0**3]))
def test_ticks_are_round_few_and_reach_far(top: float, unit: float) -> None:
    ticks = nice_ticks(top, unit)
    assert ticks[0] == 0 and 2 <= len(ticks) <= 7
    step = ticks[1]
    assert ticks[-1] <= top * (1 + 1e-9) and ticks[-1] + step > top * (1 - 1e-9)
    assert float(f"{step / unit:.1e}") == pytest.approx(step / unit)  # two digits at most


@example([("tiny", [(1.0, 5e-324)])])
@given(st.lists(st.tuples(names, st.lists(st.tuples(st.floats(1, 1e12), st.floats(0, 1)), min_size=1, max_size=6))))
def test_a_line_has_all_its_points_and_its_name(series: list[tuple[str, list[tuple[float, float]]]]) -> None:
    lines = [LineSeries(name, sorted(points)) for name, points in series]
    chart = line_chart("a chart", lines, lambda x: f"{x:g}", lambda y: f"{y:.0%}")
    if not series:
        assert chart == ""
        return
    assert len(elements(chart, "circle")) == sum(len(points) for _, points in series)
    told = [each.text for each in elements(chart, "text")]
    assert all(name in told for name, _ in series)


@given(st.lists(st.tuples(names, st.dictionaries(names, amounts, max_size=4)), max_size=5))
def test_bars_have_one_scale(rows: list[tuple[str, dict[str, float]]]) -> None:
    chart = stacked_bars("bars", rows, lambda value: f"{value:g}")
    if not any(value for _, parts in rows for value in parts.values()):
        assert chart == ""
        return
    most = max(sum(parts.values()) for _, parts in rows)
    titled = [each for each in elements(chart, "rect") if len(each)]
    drawn = sum(float(each.attrib["width"]) for each in titled)
    asked = sum(value for _, parts in rows for value in parts.values())
    assert drawn == pytest.approx(asked / most * 654, rel=0.02, abs=0.1 * len(titled) + 1)


def test_areas_stand_on_each_other() -> None:
    chart = stacked_areas("areas", [0, 1, 2], {"a": [1, 2, 3], "b": [2, 2, 2]}, "{:g}".format, "{:g}".format)
    lower, upper = ([tuple(map(float, point.split(","))) for point in each.attrib["points"].split()]
                    for each in elements(chart, "polygon"))  # fmt: skip
    assert lower[:3] == upper[:2:-1]  # the top of the lower one is the bottom of the upper one
    labels = {each.text for each in elements(chart, "text")}
    assert {"a", "b", "5"} <= labels


def test_neutral_parts_have_the_grey() -> None:
    chart = stacked_bars("bars", [("one", {"hit": 1.0, "new": 1.0})], "{:g}".format, neutral={"new"})
    classes = [re.sub(r"\D", "", each.attrib["class"]) for each in elements(chart, "rect")]
    assert classes == ["0", "7", "0", "7"]
