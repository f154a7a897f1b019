"""The files of a new component's distribution."""

from __future__ import annotations

from typing import Any

import attrs

from ..contract.hookspecs import API_VERSION
from .skeleton_reach import CUSTOM, ReachSaid

PROJECT = """\
[build-system]
requires = ["hatchling>=1.24"]
build-backend = "hatchling.build"

[project]
name = "prefixloom-{dashed}"
version = "0.1.0"
description = "{name}: a component of prefixloom."
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["prefixloom"]

[project.optional-dependencies]
test = ["prefixloom[testing]"]

[project.entry-points.prefixloom]
{name} = "{package}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
testpaths = ["tests"]
"""
README = """\
# prefixloom-{dashed}

{name}: a component of prefixloom, in a distribution of its own.

```sh
pip install -e '.[test]' && prefixloom conformance {name} && python -m pytest
```
"""
MODULE = '''\
"""{name}: a component of prefixloom."""

from __future__ import annotations

from typing import Any

from prefixloom import {imports}

prefixloom_api = {api}  # the version of the plugin contract that this was built for
{custom}

class {title}Component(Component):
    """What a token keeps in a layer, and what must be present to resume."""

    def __init__(self, name: str = "{name}", *, layers: int = {layers}) -> None:
        buffers = [
{buffers}
        ]
        super().__init__(name, Manifest(buffers{facts}), {reach})


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the component to the registry."""
    return ComponentType("{name}", {title}Component, summary="{name}")


@hookimpl
def prefixloom_truth(options: dict[str, Any]) -> Any:
    """Say what the layers do, and not what the reach says: the conformance kit compares the two."""
    from prefixloom.testing import Truth

    return Truth({truth})
'''
TESTS = '''\
"""The conformance kit on this component. What the layers do stands in ``prefixloom_truth`` of its module."""

from prefixloom.testing import ComponentCase, parametrize_with_laws

case = ComponentCase.installed("{name}")


@parametrize_with_laws(case)
def test_conformance(case, law):
    law(case)
'''


@attrs.frozen
class Skeleton:
    """What the user asked for. ``buffers`` are (name, shape, dtype)."""

    name: str
    reach: ReachSaid
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]
    layers: int
    facts: dict[str, Any]

    @property
    def package(self) -> str:
        return f"prefixloom_{self.name}"

    @property
    def title(self) -> str:
        return "".join(word.title() for word in self.name.split("_"))

    @property
    def reach_code(self) -> str:
        return self.reach.code.format(title=self.title)


def files(skeleton: Skeleton) -> dict[str, str]:
    """Return the text of every file, by its path in the distribution's folder."""
    name, reach, package = skeleton.name, skeleton.reach, skeleton.package
    words = {"name": name, "package": package, "dashed": name.replace("_", "-"), "title": skeleton.title}
    imports = ["Buffer", "Component", "ComponentType", "Manifest", *reach.imports]
    module = MODULE.format(
        **words,
        api=API_VERSION,
        imports=", ".join([*sorted(imports), "hookimpl"]),
        custom=CUSTOM.format(**words) if reach.is_custom else "",
        layers=skeleton.layers,
        buffers="\n".join(f'            Buffer("{b}", {s!r}, "{d}", range(layers)),' for b, s, d in skeleton.buffers),
        facts="".join(f", {fact}={value}" for fact, value in skeleton.facts.items()),
        reach=skeleton.reach_code,
        truth=truth(skeleton),
    )
    return {
        "pyproject.toml": PROJECT.format(**words),
        "README.md": README.format(**words),
        f"{package}/__init__.py": module,
        "tests/test_conformance.py": TESTS.format(**words),
    }


def truth(skeleton: Skeleton) -> str:
    """Return the code of the arguments of the ``Truth``."""
    facts, is_state = skeleton.facts, skeleton.reach.is_state
    said = [] if is_state else [f"reads=lambda q: {skeleton.reach.reads}", f"ahead={facts.get('lookahead', 0)}"]
    said.append(f"grid={facts.get('grid', 1)}")
    buffers = [
        f'    Buffer("{name}", {shape!r}, "{dtype}", range(options["layers"])),'
        for name, shape, dtype in skeleton.buffers
    ]
    said.append("\n        ".join(["buffers=[", *buffers, "]"]))
    if not is_state:
        said.append(f"tokens_per_entry={facts.get('tokens_per_slot', 1)}")
    return "".join(f"\n        {each}," for each in said) + "\n    "
