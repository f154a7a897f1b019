"""The house: which room may import which, who reads whose private attributes, and that a class name means one class.

The order of the rooms stands here, in ``BELOW``, and nowhere else. Imports under TYPE_CHECKING and inside functions
count. ``docs/design.md`` says what each room is for.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT

CORE = (
    "errors", "connections", "keys", "storage", "contract", "device", "tree", "operations", "insight", "cache", "tiers",
    "compose", "script", "lab", "testing", "cli",
)  # fmt: skip
"""The rooms of the core from the lowest up. Each may import all below it."""
PACKAGES: dict[str, Path] = {
    "prefixloom": ROOT / "core/prefixloom",
    "prefixloom_full": ROOT / "plugins/full/prefixloom_full",
    "prefixloom_swa": ROOT / "plugins/swa/prefixloom_swa",
    "prefixloom_mamba": ROOT / "plugins/mamba/prefixloom_mamba",
    "prefixloom_hicache": ROOT / "plugins/hicache/prefixloom_hicache",
    "prefixloom_resumable": ROOT / "plugins/events/prefixloom_resumable",
    "prefixloom_events": ROOT / "plugins/events/prefixloom_events",
    "prefixloom_policies": ROOT / "plugins/policies/prefixloom_policies",
    "prefixloom_engine": ROOT / "engine/prefixloom_engine",
    "prefixloom_fleet": ROOT / "fleet/prefixloom_fleet",
    "bench": ROOT / "bench",
}
BELOW: dict[str, dict[str, set[str]]] = {
    "prefixloom": {room: set(CORE[:at]) for at, room in enumerate(CORE)} | {
        "tiers": {"errors", "keys", "storage", "contract", "device", "tree", "operations"},  # and not the faces
    },
    "prefixloom.testing": {
        "inside": set(),
        "toy": {"inside"},
        "schedules": {"inside", "toy"},
        "kit": {"inside", "toy", "schedules"},
        "oracle": {"inside", "toy", "schedules", "kit"},
        "laws": {"inside", "toy", "schedules", "kit", "oracle"},
        "foreign": {"inside", "schedules", "kit"},
    },
    "prefixloom_hicache": {
        "records": set(),
        "memory_store": {"records"},
        "file_store": {"records"},
        "servers": {"records"},
        "guards": set(),
        "host": {"guards"},
    },
    "prefixloom_resumable": {
        "runs": set(),
        "boundaries": {"runs"},
        "pages": {"runs", "boundaries"},
        "announcements": set(),
    },
    "prefixloom_events": {
        "wire": set(),
        "hashes": set(),
        "mirror": {"wire", "hashes"},
        "rebuilt": {"wire", "hashes"},
        "publisher": {"wire", "hashes", "mirror"},
        "follower": {"wire", "rebuilt"},
        "verify": {"wire", "rebuilt", "follower"},
    },
    "prefixloom_policies": {
        "cells": {"ages"},
        "ages": set(),
        "states": set(),
        "memory": {"ages"},
        "adaptive": {"cells", "ages", "memory"},
    },
    "prefixloom_engine": {
        "contract": set(),
        "threeway": {"contract"},
        "hf": {"contract"},
        "forward": {"contract"},
        "serving": {"contract", "forward"},
        "disaggregation": {"contract", "forward", "serving"},
        "tracing": {"contract"},
        "server": {"contract", "serving", "disaggregation", "threeway", "hf", "tracing"},
        "demo": {"contract", "serving", "threeway", "hf", "tracing"},
    },
    "prefixloom_fleet": {
        "routing": set(),
        "simulation": {"routing"},
        "knowledge": {"routing"},
        "deploy": {"routing", "knowledge"},
        "commands": {"routing", "simulation", "knowledge", "deploy"},
    },
    "bench": {
        "runner": set(),
        "engines": set(),
        "workloads": {"runner", "engines"},
        "lab": {"runner"},
        "serving": {"runner", "workloads"},
        "peers": {"runner", "engines", "workloads"},
    },
}  # fmt: skip
"""By package: the rooms that each of its rooms may import from, besides itself."""
MOST_FILES = 14
"""Of one room: more are hard to find one's way in."""
BUDGET: dict[str, int] = {
    "core/prefixloom/keys": 630,
    "core/prefixloom/storage": 700,
    "core/prefixloom/contract": 2_000,
    "core/prefixloom/device": 2_670,
    "core/prefixloom/tree": 2_810,
    "core/prefixloom/operations": 3_480,
    "core/prefixloom/cache": 940,
    "core/prefixloom/tiers": 2_410,
    "core/prefixloom/insight": 1_260,
    "core/prefixloom/compose": 2_310,
    "core/prefixloom/cli": 390,
    "plugins/full": 170,
    "plugins/swa": 170,
    "plugins/mamba": 330,
    "plugins/hicache": 2_560,
    "plugins/policies": 870,
}
"""The most lines of a room of the library (# 0090). A change that needs more says so here, and why in its message."""
AROUND: dict[str, int] = {
    "core/prefixloom/testing": 11_530,
    "core/prefixloom/lab": 4_910,
    "plugins/events": 2_230,
    "plugins/sglang": 1_640,
    "plugins/vllm": 2_570,
    "engine/prefixloom_engine/contract": 930,
    "engine/prefixloom_engine/forward": 780,
    "engine/prefixloom_engine/serving": 1_740,
    "engine/prefixloom_engine/disaggregation": 2_220,
    "engine/prefixloom_engine/hf": 3_080,
    "engine/prefixloom_engine/server": 3_840,
    "engine/prefixloom_engine/tracing": 380,
    "engine/prefixloom_engine/threeway": 570,
    "engine/prefixloom_engine/demo": 910,
    "fleet/prefixloom_fleet/commands": 350,
    "fleet/prefixloom_fleet/deploy": 1_490,
    "fleet/prefixloom_fleet/knowledge": 370,
    "fleet/prefixloom_fleet/routing": 490,
    "fleet/prefixloom_fleet/simulation": 1_230,
    "bench": 6_500,
}
"""The most lines of each room around the library."""
MOST_ANY = 281
"""Uses of ``Any`` in the library: a type that nobody has found yet."""
NO_VERB = re.compile(
    r"(The|An?|What|Whether|Who|How|By|Of|One|All|Where|Some|Those|Each|As|In|If|For|It|So|At|With|Everything|Somebody|"
    r"Every|Nobody|Which|This|These|None|Nothing|Not?|Both|Two|Only|From|Here|When|Also|On|To|Their|Its|That|There)\b"
)
"""The words with which the docstring of a function does not begin."""
FACES = {"__init__", "__main__", "conformance", "suites", "pytest_plugin", "pytest_suite", "adapter"}
"""Files beside the rooms, which hand names on: they stand above all rooms of their package."""


def modules() -> dict[str, Path]:
    """Every module of every package, by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "template" in path.parts:  # a distribution that is copied, not a module of ours
                continue
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's syntax tree, which is parsed once for all rules."""
    return tuple(ast.walk(ast.parse(source)))


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """The modules of ours that ``module`` imports, wherever the import stands."""
    parts = module.split(".") if is_package else module.split(".")[:-1]
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                name = ".".join((*base, alias.name))
                found = name if name in MODULES else ".".join(base)
                if found in MODULES:
                    yield found


def room_of(module: str, package: str) -> str:
    """The room of ``package`` that a module lies in; empty for the files beside the rooms."""
    inside = module.removeprefix(package).strip(".").split(".")[0]
    return "" if inside in FACES else inside


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of a module that go to a room that its own may not import."""
    found = []
    for other in imports(source, module, is_package):
        for package, below in BELOW.items():
            if module.startswith(f"{package}.") and (other.startswith(f"{package}.") or other == package):
                here, there = room_of(module, package), room_of(other, package)
                if here and here != there and there not in below.get(here, set()):
                    found.append(f"{module} imports {other}")
    return found


def private_reads(source: str) -> set[str]:
    """Private attributes that are read of something else than ``self`` and that the module does not define itself."""
    nodes = nodes_of(source)
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    own = [node for node in reads if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")]
    defined = {node.attr for node in own}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
            if any(isinstance(target, ast.Name) and target.id == "__slots__" for target in targets):
                defined |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return {node.attr for node in reads if node not in own and not node.attr.startswith("__")} - defined


def circles(edges: dict[str, set[str]]) -> list[str]:
    """What is left when modules that import nothing that is left are taken away, again and again."""
    left = dict(edges)
    while leaves := [module for module, others in left.items() if not others & (left.keys() - {module})]:
        for module in leaves:
            del left[module]
    return sorted(left)


def test_modules_import_only_rooms_below_their_own() -> None:
    found = [upward(path.read_text(), module, path.name == "__init__.py") for module, path in MODULES.items()]
    assert [each for every in found for each in every] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """A room's face only hands names on: who imports the room's modules does not depend on it."""
    edges = {
        module: set(imports(path.read_text(), module, False))
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    assert circles({module: others & edges.keys() for module, others in edges.items()}) == []


OTHERS_PRIVATE = {
    "bench.engines.sglang": {"_mamba_cache_chunk_size"},  # of a peer
    "bench.engines.sglang_lab": {"_evict"},  # of a peer
    "bench.engines.sglang_variants": {"_alloc_mamba_slot", "_components_tuple"},  # of a peer
    "bench.engines.vllm": {"_mamba_block_aligned_split"},  # of a peer
    "bench.engines.vllm_lab": {"_insert_block_hash", "_maybe_evict_cached_block"},  # of a peer
    "bench.peers.rows": {"_exit"},  # of ``os``
    "prefixloom_engine.contract.weights": {"_version"},  # of torch
    "prefixloom_engine.hf.identity": {
        "_parameters",
        "_buffers",
        "_non_persistent_buffers_set",
        "_modules",
        "_save_to_state_dict",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
    },  # of torch
}
"""What belongs to others and has no public name."""


def test_modules_read_no_private_attribute_of_another() -> None:
    found = {module: private_reads(path.read_text()) for module, path in MODULES.items()}
    assert {module: reads for module, reads in found.items() if reads} == OTHERS_PRIVATE


WIDTH_OF_TOKENS = re.compile(r"\b(TOKEN_BYTES|has_negative)\b|tokens import .*\bCODE\b|len\(\w*tokens\) // \d")
"""What knows how many bytes a token has. tests/keys/test_wide_tokens.py sees who knows it without these names."""


def test_only_the_room_keys_knows_how_many_bytes_a_token_has() -> None:
    """Whoever wants some of a prompt's tokens asks ``Tokens.part``, and how many they are ``Tokens.count``."""
    found = [
        f"{module}: {line.strip()}"
        for module, path in MODULES.items()
        if not module.startswith("prefixloom.keys")
        for line in path.read_text().splitlines()
        if WIDTH_OF_TOKENS.search(line)
    ]
    assert found == []


OF_NODES = {"parent", "cells", "kids", "leases", "rest"}
"""What nodes keep to the tree (0091): the links between them, what lies at them, and the bytes of their edges."""
NOT_OF_NODES = {
    "prefixloom.compose.profiles": {"parent"},  # of a path of the file system
    "prefixloom.cli.new_component": {"parent"},
    "prefixloom.contract.queues": {"parent"},  # of the edges that a policy sees
    "prefixloom.contract.shares": {"parent"},
    "prefixloom.insight.debug": {"leases"},  # those that debug mode knows itself
}


def reads_of_nodes(source: str) -> set[str]:
    """What of nodes is read in ``source``, or written."""
    return {node.attr for node in nodes_of(source) if isinstance(node, ast.Attribute) and node.attr in OF_NODES}


def test_only_the_tree_knows_what_a_node_is_made_of() -> None:
    """Others call the verbs of the table "The seam of the tree" in docs/design.md."""
    found = {
        module: reads_of_nodes(path.read_text())
        for module, path in MODULES.items()
        if module.split(".")[0] == "prefixloom" and room_of(module, "prefixloom") not in ("tree", "testing", "lab")
    }
    assert {module: reads for module, reads in found.items() if reads} == NOT_OF_NODES


def test_the_rule_sees_who_walks_or_changes_a_node() -> None:
    assert reads_of_nodes("while node.parent is not None:\n    node = node.parent") == {"parent"}
    assert reads_of_nodes("node.leases += 1\ncell = run[-1].cells[lane.index]") == {"leases", "cells"}
    assert reads_of_nodes("for each in path_up(node, start):\n    lane.cell(each)") == set()


def test_a_class_name_means_one_class() -> None:
    found = collections.defaultdict(list)
    for module, path in MODULES.items():
        for node in getattr(nodes_of(path.read_text())[0], "body", ()):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


@pytest.mark.parametrize("package", BELOW)
def test_every_folder_is_a_room_that_says_what_it_is_for(package: str) -> None:
    folder = MODULES[package].parent
    rooms = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.stem for path in folder.glob("*.py")} - FACES
    assert rooms == BELOW[package].keys()
    for room in rooms:
        path = folder / room / "__init__.py"
        if path.exists():
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert len(docstring) > 80 and re.search(r"first|Read ", docstring), f"{path}: what to read first?"
            assert len(list(path.parent.glob("*.py"))) - 1 <= MOST_FILES, f"{path.parent} has too many files"


def sources(room: str) -> list[str]:
    return [path.read_text() for path in (ROOT / room).rglob("*.py") if "tests" not in path.relative_to(ROOT).parts]


@pytest.mark.parametrize("room", [*BUDGET, *AROUND])
def test_a_room_keeps_to_its_budget_of_lines(room: str) -> None:
    lines, most = sum(source.count("\n") for source in sources(room)), {**BUDGET, **AROUND}[room]
    assert lines <= most, f"{room} has {lines} lines: redesign it, or say why it needs more"
    assert lines > most - 150, f"{room} has {lines} lines: lower its budget"


def test_every_room_of_the_library_has_a_budget() -> None:
    rooms = {path.name for path in (ROOT / "core/prefixloom").iterdir() if (path / "__init__.py").exists()}
    assert rooms - {"lab", "testing"} == {room.rpartition("/")[2] for room in BUDGET if room.startswith("core/")}


def test_the_library_has_few_uses_of_any() -> None:
    assert sum(len(re.findall(r"\bAny\b", source)) for room in BUDGET for source in sources(room)) <= MOST_ANY


def without_a_verb(source: str) -> Iterator[str]:
    """Yield the functions whose docstring begins with no verb, as far as its first word tells."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            marks = {getattr(mark, "id", getattr(mark, "attr", "")) for mark in node.decorator_list}
            if NO_VERB.match(text) and not marks & {"property", "cached_property", "setter"}:
                yield node.name


def test_docstring_of_a_function_begins_with_a_verb() -> None:
    found = {}
    for room in (*BUDGET, *AROUND):
        if room != "core/prefixloom/testing":  # the docstring of a law says what holds
            names = [name for source in sources(room) for name in without_a_verb(source)]
            found.update({room: names} if names else {})
    assert found == {}


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('def f(): "Whether it is so."', True),
        ('def f(): "Return it."', False),
        ('@property\ndef f(): "The end."', False),
    ],
)
def test_the_rule_sees_a_docstring_without_a_verb(source: str, seen: bool) -> None:
    assert bool(list(without_a_verb(source))) is seen


@pytest.mark.parametrize(
    ("source", "module", "seen"),
    [
        ("from ..tree.radix import Node", "prefixloom.operations.match", False),
        ("from ..operations.match import find", "prefixloom.tree.radix", True),
        ("def f():\n    from ..cache.cache import Cache", "prefixloom.operations.match", True),
        ("if TYPE_CHECKING:\n    from ..cache.cache import Cache", "prefixloom.tiers.restore", True),
        ("from prefixloom.compose.entry import compose", "prefixloom.device.pool", True),
        ("from ..serving.engine import Engine", "prefixloom_engine.forward.stream", True),
    ],
)
def test_the_rule_sees_an_import_that_is_not_downward(source: str, module: str, seen: bool) -> None:
    assert bool(upward(source, module)) is seen


def test_the_rule_sees_a_private_attribute_of_another_module_and_a_circle() -> None:
    assert private_reads("def f(index):\n    return index._tables") == {"_tables"}
    assert private_reads("def f(self, other):\n    return self._tables == other._tables") == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
