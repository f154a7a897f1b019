"""The wheel: what it has to carry beside the code."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


DISTRIBUTIONS = (".", "plugins/sglang", "plugins/vllm", "fleet")


def project_of(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
    return told


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_a_wheel_has_its_packages_with_types_and_what_its_entry_points_name(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without py.typed, mypy takes every name of the package for Any."""
    backend = pytest.importorskip("hatchling.build", reason="the build backend")
    told = project_of(folder)
    packages = [Path(path).name for path in told["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    monkeypatch.chdir(ROOT / folder)
    with zipfile.ZipFile(tmp_path / backend.build_wheel(str(tmp_path))) as wheel:
        carried = set(wheel.namelist())
    assert packages and all(f"{package}/__init__.py" in carried for package in packages)
    assert [package for package in packages if f"{package}/py.typed" not in carried] == []
    groups = {**told["project"].get("entry-points", {}), "scripts": told["project"].get("scripts", {})}
    modules = {target.partition(":")[0].replace(".", "/") for group in groups.values() for target in group.values()}
    assert [each for each in modules if not {f"{each}.py", f"{each}/__init__.py"} & carried] == []


def test_prefixloom_alone_brings_no_plugin_of_another_program_and_all_have_one_version() -> None:
    groups = set(project_of(".")["project"]["entry-points"])
    assert groups == {"prefixloom", "prefixloom.commands", "prefixloom.observers"}
    assert len({project_of(folder)["project"]["version"] for folder in DISTRIBUTIONS}) == 1


@pytest.mark.parametrize("folder", DISTRIBUTIONS[1:])
def test_a_distribution_requires_prefixloom_of_its_own_version(folder: str) -> None:
    """They are developed together, so that another version may lack what they call."""
    told = project_of(folder)["project"]
    (required,) = [each for each in told["dependencies"] if each.startswith("prefixloom")]
    assert required.endswith(f"=={told['version']}")
