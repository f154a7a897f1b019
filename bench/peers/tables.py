"""The comparison as Markdown tables: for a terminal, and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.peers.sides import OURS, OURSELVES
from bench.runner.machine import describe

Row = dict[str, Any]


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ahead(row: Row) -> str:
    """Return how many times ``prefixloom`` is ahead, or by how much it differs if sides must agree in this row."""
    if each := row.get("ahead", {}).get(OURSELVES):
        between = f" ({short(each['least'])}-{short(each['most'])})" if each["least"] < each["most"] else ""
        return short(each["median"]) + between
    shares = [by for pair, by in row.get("differ by", {}).items() if pair.startswith(f"{OURSELVES}, ")]
    return f"{max(shares, key=abs):+.1%}" if shares else ""


def bar(row: Row) -> str:
    """Return the bar and which of our sides miss it. Bold type: ``prefixloom`` itself does."""
    if "differ by" in row:
        text = f"within {row['at most']:.0%}"
    elif "at most" in row:
        text = f"at most {row['at most']:g}"
    else:
        text = f"{row['bar']:g}" if row.get("bar") is not None else ""
    missed = dict.fromkeys(side.partition(",")[0] for side, met in row.get("met", {}).items() if not met)
    others = [side for side in missed if side != OURSELVES]
    text = f"**{text}**" if OURSELVES in missed else text
    return text + f", not {' and '.join(others)}" * bool(others)


def markdown(comparison: dict[str, Any]) -> str:
    """Return full tables of the fewest and the most components, the ratios of all compositions, and our other sides.

    What was skipped, and which rows are not the same work on a side, stand below with the reasons.
    """
    results = sorted(
        comparison["results"], key=lambda result: (len(result["comps"]), result["comps"] == "FM", result["page"])
    )
    pages = sorted({result["page"] for result in results})
    chosen = 16 if 16 in pages else pages[0]
    whole = [result for result in results if result["page"] == chosen]
    lines: list[str] = []
    for result in whole[:1] + whole[1:][-1:]:
        lines += [f"### {result['comps']}, pages of {chosen}", "", *_full(result), ""]
    lines += ["### How many times faster than the fastest peer", "", *_across(results, _times), ""]
    lines += ["### Our other sides, as a multiple of the first", "", *_across(results, _others), ""]
    reasons = {
        f"\\* {side}, {row['row']}: {why}"
        for result in results
        for row in result["rows"]
        for side, why in row["not the same work"].items()
    }
    lines += [f"- {each}" for each in sorted(reasons)]
    lines += [f"- skipped: {name}: {why}" for name, why in comparison["skipped"].items()]
    return "\n".join([*lines, "", describe(comparison["machine"])])


BEGIN, END = "<!-- python -m bench --peers --markdown -->", "<!-- end -->"


def write_into(path: Path, text: str) -> None:
    """Replace the tables that a document has between its two marks."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{path} has no line {BEGIN} with a line {END} behind it")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(heads: list[str], rows: Iterator[list[str]]) -> list[str]:
    return [_line(heads), "|" + "---|" * len(heads), *map(_line, rows)]


def _full(result: dict[str, Any]) -> list[str]:
    """Return the table of one composition, with the medians of ``prefixloom`` and of each peer."""
    found = dict.fromkeys(side for row in result["rows"] for side in row["sides"] if side not in OURS)
    sides = [OURSELVES, *found]

    def cells(row: Row) -> Iterator[str]:
        for side in sides:
            each, star = row["sides"].get(side), "\\*" if side in row["not the same work"] else ""
            yield f"{short(each['median'])}{star}" if each else ""

    rows = ([row["row"], *cells(row), ahead(row), bar(row)] for row in result["rows"])
    return _table(["work", *sides, "ahead", "bar"], rows)


def _times(row: Row) -> str:
    if each := row.get("ahead", {}).get(OURSELVES):
        times = short(each["median"])
        return times if row.get("met", {}).get(OURSELVES, True) else f"**{times}**"
    return ""


def _others(row: Row) -> str:
    """Return the cost of our other sides, divided by that of ``prefixloom``."""
    ours = row["sides"].get(OURSELVES)
    if not ours or not ours["median"] or not row["row"].endswith((", us", "tokens")) or "worst" in row["row"]:
        return ""
    others = (row["sides"].get(side) for side in OURS if side != OURSELVES)
    return " / ".join(f"{each['median'] / ours['median']:.2f}" for each in others if each)


def _across(results: list[dict[str, Any]], cell: Callable[[Row], str]) -> list[str]:
    """Return a table with one figure per row and composition. Rows without any figure are left out."""
    by_result = [{row["row"]: cell(row) for row in result["rows"]} for result in results]
    names = dict.fromkeys(name for cells in by_result for name, text in cells.items() if text)
    rows = ([name, *(cells.get(name, "") for cells in by_result)] for name in names)
    return _table(["work", *(f"{result['comps']}/{result['page']}" for result in results)], rows)
