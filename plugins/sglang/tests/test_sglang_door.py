"""What SGLang calls when it starts, as far as it needs no SGLang."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import CompositionError
from prefixloom_sglang import door, interface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def flags(**given: Any) -> dict[str, Any]:
    """SGLang's configuration without a flag, but for those that are given."""
    places: dict[str, Any] = {place: SimpleNamespace() for place in door.FLAGS}
    places["disagg"].disaggregation_mode = "null"
    places["disagg"].disaggregation_decode_retraction_backup = "cpu_tensor"
    for name, value in given.items():
        place = next((place for place, names in door.FLAGS.items() if name in names), "disagg")
        setattr(places[place], name, value)
    return places


def params(**given: Any) -> Any:
    usual = {"eviction_policy": "lru", "eviction_policy_config": None, "decoder_swa_bounded_replay": False}
    return SimpleNamespace(**(usual | given))


@pytest.mark.parametrize(("name", "flag"), [pair for names in door.FLAGS.values() for pair in names.items()])
def test_a_flag_of_sglangs_own_class_is_refused_by_name(name: str, flag: str) -> None:
    door.refuse_flags(flags(), params())
    with pytest.raises(
        CompositionError, match=f"^{flag} works only with SGLang's own cache class: leave out that flag"
    ):
        door.refuse_flags(flags(**{name: True}), params())


@pytest.mark.parametrize(
    ("flagged", "parameters", "sentence"),
    [
        ({"disaggregation_mode": "decode"}, {}, "leave out --disaggregation-decode-enable-radix-cache"),
        ({"disaggregation_decode_retraction_backup": "host_pool"}, {}, "say cpu_tensor"),
        ({}, {"eviction_policy": "tlru"}, "--radix-eviction-policy tlru .* prefixloom has lru, lfu, slru, priority"),
        ({}, {"eviction_policy_config": {"protected_threshold": 4}}, "--radix-eviction-policy-config .* leave it out"),
        ({}, {"decoder_swa_bounded_replay": True}, "--enable-decoder-swa-bounded-replay"),
    ],
)
def test_other_settings_of_sglangs_own_class_are_refused(
    flagged: dict[str, Any], parameters: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CompositionError, match=sentence):
        door.refuse_flags(flags(**flagged), params(**parameters))


def test_each_policy_that_the_door_lets_in_is_one_of_ours() -> None:
    from prefixloom_sglang.composition import Pools, books_for

    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    for policy in door.POLICIES:
        assert books_for(config, Pools(1, 8), policy=policy).composition.policy.name == policy


def test_the_entry_point_leads_to_the_door_and_imports_nothing_of_sglang() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"prefixloom": "prefixloom_sglang.door:register"}
    assert not any("sglang" in each for each in project["dependencies"]), "the engine itself is never a dependency"
    code = "import sys, prefixloom_sglang.door as door; assert 'sglang' not in sys.modules; door.register"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize(
    ("functions", "fields", "sentence"),
    [
        ({"json:dumps": ("object",)}, {}, "dumps takes obj, .* in place of object"),
        ({"json:shout": ("text",)}, {}, "shout is missing"),
        ({"no_such_module:Thing.method": ("self",)}, {}, "Thing.method is missing"),
        ({}, {"prefixloom_sglang.composition:Prefix": ("length",)}, "Prefix has no length"),
        ({}, {"prefixloom_sglang.composition:Pools": ("states", "lakes")}, "Pools has no lakes"),
        ({}, {"json:JSONDecoder": ("memo", "decode", "shout", "strings")}, "JSONDecoder has no shout, strings. "),
    ],
)
def test_a_changed_interface_is_named_with_the_version_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, tuple[str, ...]], fields: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setattr(interface, "FUNCTIONS", functions)
    monkeypatch.setattr(interface, "FIELDS", fields)
    monkeypatch.setattr(interface, "installed", lambda: "9.9.9")
    with pytest.raises(CompositionError) as caught:
        interface.check()
    told = str(caught.value)
    assert "This is SGLang 9.9.9, and there " in told
    assert "Install sglang==0.5.23, or a newer prefixloom, or leave out --radix-cache-backend" in told
    with pytest.raises(CompositionError, match=sentence):
        interface.check()


def test_what_an_object_has_from_its_class_or_from_its_beginning_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "FUNCTIONS", {"bisect:insort": ("a", "x")})
    monkeypatch.setattr(interface, "FIELDS", {"json:JSONDecoder": ("memo", "strict", "decode")})
    interface.check()


def test_the_version_that_runs_is_told_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(interface, "version", lambda name: f"7 of {name}")
    assert interface.installed() == "7 of sglang"
    monkeypatch.setattr(interface, "version", unpacked)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="8"))
    assert interface.installed() == "8"
    monkeypatch.delitem(sys.modules, "sglang")
    assert interface.installed() == "of unknown version"


def test_a_further_abstract_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    base = type("BasePrefixCache", (), {"__abstractmethods__": interface.ABSTRACT | {"juggle"}})
    module = SimpleNamespace(BasePrefixCache=base)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.base_prefix_cache", module)
    for parent in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    monkeypatch.setattr(interface, "FUNCTIONS", {})
    monkeypatch.setattr(interface, "FIELDS", {})
    with pytest.raises(CompositionError, match=r"BasePrefixCache\.juggle is a method that every cache must have"):
        interface.check()
