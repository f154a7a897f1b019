"""The comparison as text: for a terminal, and as the Markdown tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.peers.sides import OURS, OURSELVES
from bench.runner.machine import describe


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def names(result: dict[str, Any]) -> list[str]:
    """Return the sides of a composition, ours first."""
    found = list(dict.fromkeys(side for row in result["rows"] for side in row["sides"]))
    return [side for side in OURS if side in found] + [side for side in found if side not in OURS]


def ahead(row: dict[str, Any], side: str = OURSELVES) -> str:
    """Return how many times this side of ours is ahead; or by how much it differs, if sides must agree in this row."""
    if each := row.get("ahead", {}).get(side):
        between = f" ({short(each['least'])}-{short(each['most'])})" if each["least"] < each["most"] else ""
        return short(each["median"]) + between
    if "differ by" in row:
        shares = [f"{by:+.1%}" for pair, by in row["differ by"].items() if pair.startswith(f"{side}, ")]
        return max(shares, key=_size, default="")  # there may be no peer
    return ""


def _size(share: str) -> float:
    return abs(float(share.rstrip("%")))


def bar(row: dict[str, Any]) -> str:
    if "differ by" in row:
        return f"within {row['at most']:.0%}"
    if "at most" in row:
        return f"at most {row['at most']:g}"
    return f"{row['bar']:g}" if row.get("bar") is not None else ""


def missed(row: dict[str, Any]) -> list[str]:
    """Return our sides that miss the bar."""
    return list(dict.fromkeys(side.partition(",")[0] for side, each in row.get("met", {}).items() if not each))


def met(row: dict[str, Any]) -> str:
    """Return whether ``prefixloom`` meets the bar, and which other sides of ours miss it."""
    others = [side for side in missed(row) if side != OURSELVES]
    if OURSELVES in missed(row):
        return "missed"
    return "met" + f", not by {' and '.join(others)}" * bool(others) if "met" in row else ""


def terminal(comparison: dict[str, Any]) -> str:
    lines = []
    for result in comparison["results"]:
        sides = names(result)
        title = f"{result['comps']}, page {result['page']}"
        lines.append(f"{title:58}" + "".join(f"{side[:15]:>17}" for side in sides) + f"{'ahead':>20}  bar")
        for row in result["rows"]:
            cells = []
            for side in sides:
                each = row["sides"].get(side)
                cell = f"{short(each['median'])} +-{short((each['most'] - each['least']) / 2)}" if each else "-"
                cells.append(f"{cell + ('*' if side in row['not the same work'] else ''):>17}")
            lines.append(f"{row['row']:58}" + "".join(cells) + f"{ahead(row):>20}  {bar(row)} {met(row)}".rstrip())
        lines.append("")
    reasons = {
        f"* {side}, {row['row']}: {why}"
        for result in comparison["results"]
        for row in result["rows"]
        for side, why in row["not the same work"].items()
    }
    lines += sorted(reasons)
    lines += [f"skipped: {name}: {why}" for name, why in comparison["skipped"].items()]
    lines.append(describe(comparison["machine"]))
    return "\n".join(lines)


def markdown(comparison: dict[str, Any]) -> str:
    """Return full tables of the fewest and the most components, the ratios of all compositions, and our other sides."""
    results = sorted(
        comparison["results"], key=lambda result: (len(result["comps"]), result["comps"] == "FM", result["page"])
    )
    pages = sorted({result["page"] for result in results})
    chosen = 16 if 16 in pages else pages[0]
    whole = [result for result in results if result["page"] == chosen]
    lines: list[str] = []
    for result in whole[:1] + whole[1:][-1:]:
        lines += [f"### {result['comps']}, pages of {chosen}", "", *_full(result), ""]
    lines += [
        "### How many times faster than the fastest peer",
        "",
        *_ratios(results),
        "",
        "### Our other sides, as a multiple of the first",
        "",
        *_beside(results),
    ]
    lines += ["", describe(comparison["machine"])]
    return "\n".join(lines)


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


def _head(cells: list[str]) -> Iterator[str]:
    yield _line(cells)
    yield "|" + "---|" * len(cells)


def _full(result: dict[str, Any]) -> Iterator[str]:
    sides = [side for side in names(result) if side == OURSELVES or side not in OURS]
    yield from _head(["work", *sides, "ahead", "bar"])
    for row in result["rows"]:
        cells = []
        for side in sides:
            each = row["sides"].get(side)
            star = "\\*" if side in row["not the same work"] else ""
            cells.append(f"{short(each['median'])}{star}" if each else "")
        yield _line([row["row"], *cells, ahead(row), f"**{bar(row)}**" if OURSELVES in missed(row) else bar(row)])


def _ratios(results: list[dict[str, Any]]) -> Iterator[str]:
    yield from _across(results, lambda row: _of(row, OURSELVES))


def _of(row: dict[str, Any], side: str) -> str:
    if each := row.get("ahead", {}).get(side):
        times = short(each["median"])
        return times if row.get("met", {}).get(side, True) else f"**{times}**"
    return ""


def _beside(results: list[dict[str, Any]]) -> Iterator[str]:
    """Return the cost of our other sides, divided by that of ``prefixloom``."""

    def cell(row: dict[str, Any]) -> str:
        ours = row["sides"].get(OURSELVES)
        if not ours or not ours["median"] or not row["row"].endswith((", us", "tokens")) or "worst" in row["row"]:
            return ""
        others = (row["sides"].get(side) for side in OURS if side != OURSELVES)
        return " / ".join(f"{each['median'] / ours['median']:.2f}" for each in others if each)

    yield from _across(results, cell)


def _across(results: list[dict[str, Any]], cell: Any) -> Iterator[str]:
    """Return a table with one figure per row and composition."""
    yield from _head(["work", *(f"{result['comps']}/{result['page']}" for result in results)])
    rows = dict.fromkeys(row["row"] for result in results for row in result["rows"])
    for name in rows:
        by_result = [next((row for row in result["rows"] if row["row"] == name), None) for result in results]
        cells = [cell(row) if row else "" for row in by_result]
        if any(cells):
            yield _line([name, *cells])
