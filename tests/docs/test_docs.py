"""The documents are true: hooks, manifest and reaches stand in docs/hooks.md as they are, and every example runs."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from math import inf
from pathlib import Path as File
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest

import prefixloom
import prefixloom_engine
from prefixloom import (
    Cache,
    CacheStats,
    ComponentStats,
    LayerFacts,
    Manifest,
    ModelFacts,
    Optional,
    Path,
    Point,
    Sequence,
    Sinks,
    Tail,
    TierManifest,
    TierStats,
    Window,
)
from prefixloom.contract import reach
from prefixloom.contract.hookspecs import COLD_HOOKS, HOT_HOOKS, ComponentSpecs, RegistrySpecs
from prefixloom.contract.reach import Chunk, Reach, merged
from prefixloom.operations.step import Step
from tests.support.api_names import is_internal
from tests.support.helpers import cache_of, part

ROOT = File(__file__).resolve().parents[2]
CORE = ROOT / "core" / "prefixloom"
DOCS = [ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
HOOKS = ROOT / "docs" / "hooks.md"
DESIGN = ROOT / "docs" / "design.md"
ENGINE = ROOT / "docs" / "engine.md"
RUN = [path for path in sorted(ROOT.glob("docs/*.md")) if "```python" in path.read_text()]
"""Documents whose python blocks run."""


def named(path: File) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> Iterator[str]:
    """The python blocks, each moved down to where it stands, so that a traceback names the document's line."""
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield "\n" * text.count("\n", 0, found.start(1)) + found[1]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def signature(name: str) -> str:
    """A hook's signature as hookspecs.py has it, without self."""
    specs = RegistrySpecs if name in COLD_HOOKS else ComponentSpecs
    found = inspect.signature(getattr(specs, name))
    arguments = [f"{p.name}: {p.annotation}" for p in list(found.parameters.values())[1:]]
    return f"{name}({', '.join(arguments)}) -> {found.return_annotation}"


def sections(text: str) -> dict[str, str]:
    """Third-level headings, without backticks, and what stands under each."""
    parts = re.split(r"^### (.*)$", prose(text), flags=re.MULTILINE)[1:]
    return {
        title.replace("`", ""): re.split(r"^## ", body, flags=re.MULTILINE)[0]
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }


def table(text: str, *header: str) -> list[list[str]]:
    """The rows of the one table whose header begins with these columns."""
    found: list[list[list[str]]] = []
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [
            [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in lines.splitlines()
        ]
        if tuple(rows[0][: len(header)]) == header:
            found.append(rows[2:])
    (rows,) = found
    return rows


def bare(cell: str) -> str:
    return cell.strip("*` ")


# ---------------------------------------------------------------- hooks


def test_every_hook_has_a_heading_with_its_exact_signature_in_the_order_of_the_specifications() -> None:
    assert list(sections(HOOKS.read_text())) == [signature(name) for name in (*COLD_HOOKS, *HOT_HOOKS)]


def test_every_hook_is_told_when_it_is_called_how_it_is_folded_and_what_happens_if_it_raises() -> None:
    for name, body in sections(HOOKS.read_text()).items():
        said = re.findall(r"^- \*\*[A-Z]\d+\. (\w+)\.\*\* ", body, re.MULTILINE)
        told = "Mutates" if name.startswith("run_forward_op") else "When"
        assert said[0] == "When" and {told, "Folded", "Raises"} <= set(said), name


def test_every_hook_has_an_example_that_overrides_it() -> None:
    source = "".join(blocks(HOOKS.read_text()))
    for name in (*COLD_HOOKS, *HOT_HOOKS):
        assert re.search(rf"@hookimpl\n +def {name}\(self|^@hookimpl\ndef {name}\(", source, re.MULTILINE), name


def test_the_table_of_derived_defaults_has_every_hot_hook_and_every_kind_of_reach() -> None:
    rows = table(HOOKS.read_text(), "hook")
    assert tuple(bare(row[0]) for row in rows) == HOT_HOOKS
    assert all(len(row) == 4 and all(row) for row in rows)


# ---------------------------------------------------------------- clauses


def test_clauses_are_numbered_without_gaps() -> None:
    found = re.findall(r"^(?:- |\| )\*\*([A-Z])(\d+)\b", HOOKS.read_text(), re.MULTILINE)
    letters = [letter for letter, _ in found]
    assert len(set(letters)) == len(list(itertools.groupby(letters))), "a letter stands in two places"
    for letter in dict.fromkeys(letters):
        numbers = [int(number) for one, number in found if one == letter]
        assert numbers == list(range(1, len(numbers) + 1)), letter


def test_every_clause_that_is_cited_exists() -> None:
    text = HOOKS.read_text()
    known = set(re.findall(r"^(?:- |\| )\*\*([A-Z]\d+)\b", text, re.MULTILINE))
    cited = {clause for path in DOCS for clause in re.findall(r"(?<![*\w-])([A-Z]\d{1,2})\b(?!\*)", path.read_text())}
    assert {"C5", "X2"} <= cited
    assert cited - known == set()


# ---------------------------------------------------------------- manifest and reach


def test_every_fact_of_the_manifest_is_in_the_table_with_its_default() -> None:
    rows = {bare(row[1]): bare(row[2]) for row in table(HOOKS.read_text(), "clause", "fact")}
    fields = attrs.fields(Manifest)
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
        assert rows[field.name] == ("required" if default is attrs.NOTHING else repr(default).replace("'", '"'))


VALUES: dict[str, Any] = {"w": 5, "c": 8, "k": 3, "s": 6, "a": Window(5), "b": Sinks(6)}
NAMES = {each.__name__: each for each in (Path, Window, Point, Chunk, Tail, Sinks, Optional)}
COMBINATORS = {"a | b": "Union", "a.shift(k)": "Shift"}
REACHES = table(HOOKS.read_text(), "clause", "reach")


def test_every_combinator_is_in_the_table() -> None:
    classes = [c for _, c in inspect.getmembers(reach, inspect.isclass) if issubclass(c, Reach) and c is not Reach]
    rows = [bare(row[1]) for row in REACHES]
    assert sorted(COMBINATORS.get(row, row.partition("(")[0]) for row in rows) == sorted(c.__name__ for c in classes)
    for name in set(NAMES) | {"Reach"}:
        assert name in prefixloom.__all__


@pytest.mark.parametrize("row", REACHES, ids=lambda row: bare(row[1]))
def test_a_combinators_row_is_what_it_does(row: list[str]) -> None:
    _, said, needs, until, unit, lane = (bare(cell) for cell in row)
    it: Reach = eval(said, {}, NAMES | VALUES)
    for n in range(60):
        assert merged(it.needs(n)) == merged(eval(needs, {"n": n}, VALUES)), f"needs({n})"
        assert it.until(n) == eval(until, {"p": n, "inf": inf}, VALUES), f"until({n})"
    assert it.unit == unit
    assert type(cache_of(part("it", it)).core.shape.lanes[0]).__name__ == lane


def test_every_figure_that_an_admission_policy_sees_is_in_its_table() -> None:
    rows = table(HOOKS.read_text(), "StateView")
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row[0])] == [
        field.name for field in attrs.fields(prefixloom.StateView)
    ]


# ---------------------------------------------------------------- the engine's page


def told(title: str) -> set[str]:
    """What stands in the first column of the engine page's table of this title."""
    rows = table(ENGINE.read_text(), title)
    assert all(len(row) == 2 and all(row) for row in rows)
    return {name for row in rows for name in re.findall(r"`(\w+)", row[0])}


@pytest.mark.parametrize("cls", [prefixloom.Cache, prefixloom.MatchPlan, prefixloom.Sequence, Step])
def test_every_public_name_that_an_engine_calls_is_in_its_table(cls: type) -> None:
    slots = (name for base in cls.__mro__ for name in getattr(base, "__slots__", ()))
    names = {name for name in (*dir(cls), *slots) if not name.startswith("_")}
    internal = {name for name in names if is_internal(getattr(cls, name))}
    assert names - internal <= told(cls.__name__) <= names


@pytest.mark.parametrize("cls", [CacheStats, ComponentStats, TierStats, TierManifest, LayerFacts, ModelFacts])
def test_every_figure_and_fact_is_in_its_table(cls: type) -> None:
    assert told(cls.__name__) == {field.name for field in attrs.fields(cls)}


REFERENCE = ROOT / "docs" / "engine-reference.md"


@pytest.mark.parametrize("cls", [prefixloom_engine.Request, prefixloom_engine.Answer, prefixloom_engine.Engine])
def test_the_reference_engines_page_has_every_public_name(cls: type) -> None:
    said = {name for row in table(REFERENCE.read_text(), cls.__name__) for name in re.findall(r"`(\w+)", row[0])}
    if cls is prefixloom_engine.Engine:
        names = set(inspect.signature(cls).parameters) - {"model", "cache"}
        names |= {name for name in vars(cls) if not name.startswith("_")} - {"generate", "stream"}
    else:
        names = {field.name for field in attrs.fields(cls)} | ({"done"} if hasattr(cls, "done") else set())
    assert said == names


@pytest.mark.parametrize("function", [Cache.match, Cache.peek, Cache.open, Cache.step, Sequence.grow])
def test_the_engine_page_has_the_signatures_with_their_defaults(function: Any) -> None:
    found = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in list(found.parameters.values())[1:]]
    said = str(found.replace(parameters=parameters, return_annotation=found.empty)).replace("'", '"')
    assert f"| `{function.__name__}{said}` |" in ENGINE.read_text()


# ---------------------------------------------------------------- blocks, names, links


@pytest.mark.parametrize("path", RUN, ids=named)
def test_every_python_block_runs(path: File, installed: None) -> None:
    for module in re.findall(r"^<!-- needs: (\w+) -->$", path.read_text(), re.MULTILINE):
        pytest.importorskip(module, reason=f"the examples of {path.name} need it, and it is an extra")
    scope: dict[str, Any] = {"__name__": path.stem}
    found = list(blocks(path.read_text()))
    assert found
    assert path.read_text().count("```python") == len(found)
    for block in found:
        exec(compile(block, str(path), "exec"), scope)


def test_the_documents_with_examples_are_found() -> None:
    assert {DESIGN, HOOKS, ENGINE} <= set(RUN)


def test_no_other_document_has_blocks_that_nobody_runs() -> None:
    assert [named(path) for path in DOCS if "```python" in path.read_text() and path not in RUN] == []


def homes() -> dict[str, list[str]]:
    """The dotted names that the first word of a name in the design may stand for: a module of any room, or a room."""
    found: dict[str, list[str]] = {}
    for path in sorted(CORE.rglob("*.py")):
        parts = ("prefixloom", *path.relative_to(CORE).with_suffix("").parts)
        if path.name == "__init__.py":
            parts = parts[:-1]
        if len(parts) == 2 or (len(parts) == 3 and parts[1] not in ("testing", "cli") and parts[2][0] != "_"):
            found.setdefault(parts[-1], []).append(".".join(parts))
    return found


def resolves(name: str) -> bool:
    """Whether ``module.Class.attribute`` exists in prefixloom, in one of the modules of that name."""
    head, *rest = name.split(".")
    return any(has(import_module(home), rest) for home in homes()[head])


def has(found: Any, attributes: list[str]) -> bool:
    for attribute in attributes:
        if isinstance(found, ModuleType) and hasattr(found, "__path__") and find_spec(f"{found.__name__}.{attribute}"):
            import_module(f"{found.__name__}.{attribute}")
        if not hasattr(found, attribute) and attribute not in getattr(found, "__annotations__", {}):
            return False
        found = getattr(found, attribute, None)
    return True


def modules() -> set[str]:
    return set(homes())


@pytest.mark.parametrize("text", [DESIGN.read_text(), (DESIGN.parent / "request.svg").read_text()], ids=["md", "svg"])
def test_everything_that_the_design_names_exists(text: str) -> None:
    text = prose(text)
    quoted = re.findall(r"`([a-z_]+(?:\.\w+)+)`", text) + re.findall(r"[ (>]([a-z_]+(?:\.[A-Za-z_]\w+)+)[<),:]", text)
    files = (".md", ".py", ".svg")
    dotted = {name for name in quoted if name.partition(".")[0] != "prefixloom" and not name.endswith(files)}
    assert len(dotted) > 8
    assert {name for name in dotted if name.partition(".")[0] not in modules()} == set()
    assert [name for name in sorted(dotted) if not resolves(name)] == []


def test_every_room_is_in_the_table_and_what_is_to_be_read_exists() -> None:
    text = DESIGN.read_text()
    rows = table(text, "room", "for")
    rooms = {path.name for path in CORE.iterdir() if (path / "__init__.py").exists()}
    assert rooms | {"errors", "connections", "script"} == {row[0].strip("`") for row in rows}
    first = re.search(r"## Where to read first\n(.*)", text, re.DOTALL)
    assert first is not None
    to_read = [*re.findall(r"`([\w.]+)`", first[1]), *(row[3].strip("`") for row in rows)]
    assert [name for name in to_read if not name.endswith(".py") and not resolves(name)] == []


def test_every_room_has_a_row_for_contributors_and_what_the_row_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = table(text, "room", "its tests")
    named_rooms = {name for row in rows for name in re.findall(r"`([\w/]+)`", row[0])}
    rooms = {path.name for path in CORE.iterdir() if (path / "__init__.py").exists()}
    plugins = {f"plugins/{path.name}" for path in ROOT.glob("plugins/*/") if (path / "README.md").exists()}
    assert named_rooms == rooms | plugins | {"errors", "connections", "script", "engine", "fleet", "bench"}
    commands = re.findall(r"`pytest ([^`]+)`", text)
    paths = {word for command in commands for word in command.split() if word[0] != "-" and word != "outside"}
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {name for name in re.findall(r"python -m ([\w.]+)", text) if find_spec(name) is None} == set()


@functools.cache
def anchors(path: File) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_resolve() -> None:
    for path in DOCS:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
            file, _, anchor = target.partition("#")
            goal = path.parent / file if file else path
            found = re.match(r"https?:", target) or (goal.exists() and (not anchor or anchor in anchors(goal)))
            assert found, f"{named(path)}: {target}"


def test_every_decision_is_numbered_indexed_and_says_context_decision_and_consequence() -> None:
    folder = ROOT / "docs" / "decisions"
    records = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    numbers = [path.name[:4] for path in records]
    assert all(number.isdigit() for number in numbers) and len(set(numbers)) == len(numbers)
    index = {bare(row[0]): row[1] for row in table((folder / "README.md").read_text(), "")}
    for path in records:
        text = path.read_text()
        title = text.splitlines()[0].removeprefix(f"# {path.name[:4]}. ")
        assert index[f"[{path.name[:4]}]({path.name})"] == title
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Consequence"]
        sentences = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)  # a table of figures is not counted
        assert len(sentences.split()) < 350, f"{path.name} is longer than half a page"


def test_the_picture_is_whole_and_shown() -> None:
    assert "](request.svg)" in DESIGN.read_text()
    picture = ElementTree.parse(DESIGN.parent / "request.svg").getroot()
    _, _, width, height = (float(edge) for edge in picture.attrib["viewBox"].split())
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 < float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) < height, text.text
