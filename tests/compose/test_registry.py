"""The registry over distributions that lie on disk, as pip would leave them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from prefixloom import AdmissionPolicy, CompositionError, EvictionPolicy
from prefixloom.compose.registry import Offer, Registry, default_registry
from prefixloom.testing import ComponentCase

Distribution = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
RING = """
from prefixloom import Buffer, Component, ComponentType, Manifest, Window, hookimpl

class Ring(Component):
    def __init__(self, name="ring", w=8):
        super().__init__(name, Manifest([Buffer("k", (1,))]), Window(w))

@hookimpl
def prefixloom_component():
    return ComponentType("ring", Ring, "a ring", {"ring_attention"}, lambda facts, layers: {"w": 4})
"""


def only(registry: Registry, name: str) -> Offer:
    (found,) = [offer for offer in registry.offers() if offer.name == name]
    return found


def test_a_component_is_found_by_its_entry_point_name(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_mod"}, {"ring_mod": RING})
    component = Registry().component("ring")
    assert component.kind == "ring"
    assert component.make(name="r2").name == "r2"


def test_an_instance_can_be_the_target_of_an_entry_point(distribution: Distribution) -> None:
    source = RING.replace("@hookimpl\ndef", "class Offers:\n  @hookimpl\n  def").replace(
        "prefixloom_component():\n    return", "prefixloom_component(self):\n    return"
    )
    distribution("prefixloom-ring", {"ring": "ring_obj:offers"}, {"ring_obj": source + "\noffers = Offers()\n"})
    assert Registry().component("ring").summary == "a ring"


def test_only_the_selected_plugin_is_imported(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_lazy"}, {"ring_lazy": RING})
    distribution("prefixloom-other", {"other": "other_lazy"}, {"other_lazy": "raise RuntimeError('imported')"})
    registry = Registry()
    assert {"ring", "other"} <= set(registry.names("component"))
    assert "ring_lazy" not in sys.modules
    registry.component("ring")
    assert "ring_lazy" in sys.modules
    assert "other_lazy" not in sys.modules


def test_the_kinds_of_layers_that_a_component_serves_are_listed_in_order(distribution: Distribution) -> None:
    kinds = set("abcdefgh")
    distribution("prefixloom-ring", {"ring": "ring_of"}, {"ring_of": RING.replace('{"ring_attention"}', repr(kinds))})
    assert only(Registry(), "ring").layer_kinds == tuple("abcdefgh")


def test_a_component_is_asked_for_its_type_once(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_once"}, {"ring_once": RING})
    registry = Registry()
    assert registry.component("ring") is registry.component("ring")


TRUTH = """
@hookimpl
def prefixloom_truth(options):
    from prefixloom.testing import Truth
    return Truth(reads=lambda q: range(max(0, q + 1 - options["w"]), q))
"""


def test_the_truth_about_a_component_comes_with_it_and_gets_all_options(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_true"}, {"ring_true": RING + TRUTH})
    default_registry.cache_clear()
    assert ComponentCase.installed("ring").truth.reads(100) == range(93, 100)  # type: ignore[misc]
    assert ComponentCase.installed("ring", w=4).truth.reads(100) == range(97, 100)  # type: ignore[misc]
    assert Registry().truth("ring", {"w": 2}).reads(9) == range(8, 9)
    default_registry.cache_clear()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (TRUTH.replace("@hookimpl\n", ""), "entry point 'ring_lie'.: decorate its prefixloom_truth with @hookimpl"),
        (TRUTH.replace("(options)", "(component)"), "does not fit the hook specifications"),
        (
            TRUTH.replace("return Truth", "return dict"),
            r"prefixloom_truth answered .*must return a prefixloom.testing.T",
        ),
        (
            TRUTH.replace("return Truth", "raise KeyError"),
            r"raised in prefixloom_truth .*(TypeError|KeyError): .*",
        ),
    ],
)
def test_a_truth_that_cannot_be_had_is_refused_with_the_reason(
    distribution: Distribution, source: str, told: str
) -> None:
    distribution("prefixloom-ring", {"ring": "ring_lie"}, {"ring_lie": RING + source})
    default_registry.cache_clear()
    with pytest.raises(CompositionError, match=told):
        ComponentCase.installed("ring")
    default_registry.cache_clear()


def test_an_unknown_component_lists_what_is_installed_and_suggests_a_close_name(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_mod"}, {"ring_mod": RING})
    with pytest.raises(CompositionError, match=r"offers a component named 'rink'.*mean .*'ring'\?.*Installed: .*ring"):
        Registry().component("rink")


def test_an_unknown_component_where_nothing_is_installed_says_none() -> None:
    with pytest.raises(CompositionError, match="Installed: none"):
        Registry([]).component("ring")


def test_two_distributions_of_one_name_are_refused_and_both_are_named(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_a"}, {"ring_a": RING}, version="1.2")
    distribution("ring-two", {"ring": "ring_b"}, {"ring_b": RING}, version="3.4")
    registry = Registry()
    with pytest.raises(CompositionError, match=r"2 distributions: .*prefixloom-ring 1\.2.*ring-two 3\.4.*Uninstall"):
        registry.component("ring")
    assert not {"ring_a", "ring_b"} & set(sys.modules)
    broken = [offer for offer in registry.offers() if offer.name == "ring"]
    assert [(offer.distribution, offer.status) for offer in broken] == [
        ("ring-two", "broken"),
        ("prefixloom-ring", "broken"),
    ]


def test_one_distribution_seen_twice_on_the_path_is_no_conflict(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_c"}, {"ring_c": RING}, folder="site")
    distribution("Prefixloom_Ring", {"ring": "ring_c"}, {"ring_c": RING}, version="1.1", folder="editable")
    assert Registry().component("ring").kind == "ring"
    assert only(Registry(), "ring").version == "1.1", "the one first on the path is the one that Python imports"


def test_entry_points_of_one_distribution_given_twice_are_one() -> None:
    distributed = [_Point("ring", "ring_x", "prefixloom-ring"), _Point("ring", "ring_y", "Prefixloom.Ring")]
    with pytest.raises(CompositionError, match=r"ring_x.*failed to import"):
        Registry(distributed).component("ring")


class _Point:
    """An entry point with a distribution that has no more than a name."""

    def __init__(self, name: str, value: str, distribution: str) -> None:
        self.name = name
        self.value = value
        self.dist = type("Dist", (), {"metadata": {"Name": distribution, "Version": "9"}})()

    def load(self) -> object:
        raise ImportError(f"no {self.value}")


def test_a_distribution_without_metadata_is_still_reported() -> None:
    registry = Registry([EntryPoint("ring", "no_such_module_at_all", "prefixloom")])
    with pytest.raises(CompositionError, match=r"a distribution without a name.*failed to import"):
        registry.component("ring")


def test_two_offers_of_one_name_without_a_distribution_are_a_conflict() -> None:
    points = [EntryPoint("ring", value, "prefixloom") for value in ("ring_a", "ring_a", "ring_b")]
    with pytest.raises(CompositionError, match="'ring' is offered by 2 distributions"):
        Registry(points).component("ring")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit('nothing for you')", "SystemExit: nothing for you"),
    ],
)
def test_a_plugin_that_fails_to_import_names_its_distribution_and_chains_the_cause(
    distribution: Distribution, source: str, told: str
) -> None:
    distribution("prefixloom-ring", {"ring": "ring_broken"}, {"ring_broken": source}, version="0.7")
    with pytest.raises(CompositionError, match=r"distribution prefixloom-ring 0\.7.*failed to import") as caught:
        Registry().component("ring")
    assert told in str(caught.value)
    assert caught.value.__cause__ is not None


BAD = {
    "a_class": (RING + "\nclass Offers:\n    prefixloom_component = 1\n", ":Offers", "points to <class .*Offers"),
    "none": (RING + "\nnothing = None\n", ":nothing", "points to None"),
    "wrong_signature": (
        RING.replace("prefixloom_component():", "prefixloom_component(kind):"),
        "",
        "does not fit the hook specifications.*kind",
    ),
    "unknown_hook": (
        RING + "\n@hookimpl\ndef prefixloom_componet():\n    pass\n",
        "",
        "does not fit.*unknown hook 'prefixloom_componet'",
    ),
    "no_hook": ("x = 1", "", "promises prefixloom_component by its name.*Define prefixloom_component"),
    "undecorated": (
        RING.replace("@hookimpl", ""),
        "",
        r"'ring_bad_undecorated'.: decorate its prefixloom_component with @hookimpl",
    ),
    "wrong_type": (RING.replace("return ", "return Ring or "), "", "must return one ComponentType"),
    "answers_none": (RING.replace("return ", "return None and "), "", "answered None"),
    "raises": (
        RING.replace("return ", "raise KeyError('w')\n    "),
        "",
        "raised in prefixloom_component: KeyError",
    ),
    "another_name": (RING.replace('"ring", Ring', '"rong", Ring'), "", "called 'rong'.*must agree"),
    "newer_api": (
        RING + "\nprefixloom_api = 99\n@hookimpl\ndef prefixloom_of_later(): pass",
        "",
        "built for version 99 of the plugin contract and this prefixloom speaks version 1. Upgrade prefixloom$",
    ),
    "older_api": (
        RING + "\nprefixloom_api = 0",
        "",
        "version 0 .*Upgrade prefixloom-ring, or install a prefixloom of version 0$",
    ),
    "strange_api": (RING + "\nprefixloom_api = 'one'", "", "version 'one' .*must be a whole number: report it there$"),
    "true_api": (RING + "\nprefixloom_api = True", "", "version True .*must be a whole number"),
    "tried_first": (
        RING.replace("@hookimpl", "@hookimpl(tryfirst=True)"),
        "",
        "prefixloom_component is marked tryfirst, which has no effect: .*in the order of its names. Leave it out",
    ),
    "tried_last": (RING.replace("@hookimpl", "@hookimpl(trylast=True)"), "", "is marked trylast"),
    "no_from_layers": (
        RING.replace('lambda facts, layers: {"w": 4}', "None"),
        "",
        "names layer_kinds but has no from_layers",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_plugin_that_breaks_the_contract_is_refused_with_the_reason(distribution: Distribution, case: str) -> None:
    source, attribute, told = BAD[case]
    module = f"ring_bad_{case}"
    distribution("prefixloom-ring", {"ring": module + attribute}, {module: source})
    with pytest.raises(CompositionError, match=told) as caught:
        Registry().component("ring")
    assert "prefixloom-ring 1.0" in str(caught.value)
    assert only(Registry(), "ring").status == "broken"


def test_policies_and_storages_are_found_under_their_prefix(distribution: Distribution) -> None:
    source = """
from prefixloom import AdmissionPolicy, EvictionPolicy, hookimpl
from prefixloom.storage import BackendType

@hookimpl
def prefixloom_policy():
    return EvictionPolicy("biggest", key=lambda use: -use.tokens)

@hookimpl
def prefixloom_admission():
    return AdmissionPolicy("lasts", admit=lambda state: state.last)

@hookimpl
def prefixloom_storage():
    return BackendType("shelf", dict, "records on a shelf")
"""
    entries = {"policy:biggest": "extras", "admission:lasts": "extras", "storage:shelf": "extras"}
    distribution("prefixloom-extras", entries, {"extras": source})
    registry = Registry()
    assert isinstance(registry.policy("biggest"), EvictionPolicy)
    assert isinstance(registry.admission("lasts"), AdmissionPolicy)
    assert {("biggest", "ok"), ("lasts", "ok"), ("shelf", "ok")} <= {
        (offer.name, offer.status) for offer in registry.offers()
    }
    assert registry.storage("shelf").open is dict
    assert only(registry, "shelf").summary == "records on a shelf"
    assert "biggest" in registry.names("policy")
    assert "biggest" not in registry.names("component")
    assert registry.source("policy", "biggest") == "distribution prefixloom-extras 1.0"


@pytest.mark.parametrize(
    ("answer", "told"),
    [("dict", "must return one BackendType"), ('BackendType("other", dict)', "called 'other'.*must agree")],
)
def test_a_storage_that_answers_something_else_is_refused(distribution: Distribution, answer: str, told: str) -> None:
    source = "from prefixloom import hookimpl\nfrom prefixloom.storage import BackendType\n"
    source += f"@hookimpl\ndef prefixloom_storage():\n    return {answer}"
    distribution("prefixloom-extras", {"storage:shelf": "shelf_else"}, {"shelf_else": source})
    with pytest.raises(CompositionError, match=rf"prefixloom-extras 1\.0.*{told}"):
        Registry().storage("shelf")


@pytest.mark.parametrize("offer", ["session", "policy", "admission", "storage"])
def test_every_kind_of_offer_says_for_which_version_it_was_built(distribution: Distribution, offer: str) -> None:
    module = f"later_{offer}"
    distribution("prefixloom-later", {f"{offer}:late": module}, {module: "prefixloom_api = 2"}, version="9.1")
    (found,) = [known for known in Registry().offers() if known.name == "late"]
    assert found.status == "broken"
    assert "prefixloom-later 9.1" in found.reason and found.reason.endswith("Upgrade prefixloom")


def test_a_storage_that_answers_nothing_is_refused(distribution: Distribution) -> None:
    source = "from prefixloom import hookimpl\n@hookimpl\ndef prefixloom_storage():\n    return None"
    distribution("prefixloom-extras", {"storage:shelf": "shelf_none"}, {"shelf_none": source})
    with pytest.raises(CompositionError, match=r"prefixloom-extras 1\.0.*prefixloom_storage answered None"):
        Registry().storage("shelf")


def test_a_policy_of_the_wrong_type_or_with_a_built_in_name_is_refused(distribution: Distribution) -> None:
    source = "from prefixloom import EvictionPolicy, hookimpl\n@hookimpl\ndef prefixloom_policy():\n    return {}"
    entries = {"policy:lru": "policy_lru", "policy:odd": "policy_odd"}
    modules = {"policy_lru": source.format("EvictionPolicy('lru')"), "policy_odd": source.format("42")}
    distribution("prefixloom-extras", entries, modules)
    with pytest.raises(CompositionError, match="takes the name of a built-in policy"):
        Registry().policy("lru")
    with pytest.raises(CompositionError, match=r"answered 42.*must return one EvictionPolicy"):
        Registry().policy("odd")


def test_an_admission_policy_of_the_wrong_type_or_with_a_built_in_name_is_refused(distribution: Distribution) -> None:
    source = (
        "from prefixloom import AdmissionPolicy, EvictionPolicy, hookimpl\n@hookimpl\ndef prefixloom_admission():\n"
    )
    entries = {"admission:all": "admission_all", "admission:odd": "admission_odd", "admission:other": "admission_other"}
    modules = {
        "admission_all": source + "    return AdmissionPolicy('all')",
        "admission_odd": source + "    return EvictionPolicy('odd')",
        "admission_other": source + "    return AdmissionPolicy('another')",
    }
    distribution("prefixloom-extras", entries, modules)
    with pytest.raises(CompositionError, match="takes the name of a built-in policy"):
        Registry().admission("all")
    with pytest.raises(CompositionError, match=r"answered EvictionPolicy\(.*must return one AdmissionPolicy"):
        Registry().admission("odd")
    with pytest.raises(CompositionError, match=r"AdmissionPolicy called 'another'.*must agree on the name"):
        Registry().admission("other")


def test_an_entry_point_of_an_unknown_kind_is_reported_as_broken(distribution: Distribution) -> None:
    distribution("prefixloom-odd", {"flavour:sweet": "sweet_mod"}, {"sweet_mod": ""})
    assert "is of no kind that prefixloom knows" in only(Registry(), "sweet").reason


def test_offers_load_everything_and_tell_what_works_from_what_does_not(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_fine"}, {"ring_fine": RING}, version="2.0")
    distribution("prefixloom-bad", {"bad": "bad_mod"}, {"bad_mod": "import no_such_dependency"})
    registry = Registry()
    fine, bad = only(registry, "ring"), only(registry, "bad")
    assert fine == Offer("component", "ring", "prefixloom-ring", "2.0", "ok", "", "a ring", ("ring_attention",))
    assert (bad.status, bad.distribution) == ("broken", "prefixloom-bad")
    assert "no_such_dependency" in bad.reason


def test_kinds_by_layer_lists_every_component_that_serves_a_layer_kind(distribution: Distribution) -> None:
    distribution("prefixloom-ring", {"ring": "ring_one"}, {"ring_one": RING})
    other = RING.replace('"ring", Ring', '"ring2", Ring').replace('{"ring_attention"}', '{"ring_attention", "arc"}')
    distribution("ring-two", {"ring2": "ring_two"}, {"ring_two": other})
    distribution("prefixloom-bad", {"bad": "bad_two"}, {"bad_two": "import no_such_dependency"})
    served = Registry().kinds_by_layer()
    assert (served["arc"], served["ring_attention"]) == (("ring2",), ("ring", "ring2"))
    assert list(served) == sorted(served)


def test_the_entry_points_of_this_repository_all_work(distribution: Distribution) -> None:
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    distribution(project["name"], project["entry-points"]["prefixloom"], version=project["version"])
    own = [offer for offer in Registry().offers() if offer.distribution == project["name"]]
    assert {offer.name for offer in own} == {
        entry.rpartition(":")[2] for entry in project["entry-points"]["prefixloom"]
    }
    assert [offer.reason for offer in own if offer.status == "broken"] == []


def test_importing_the_core_reads_no_entry_point_and_imports_no_plugin_and_no_torch() -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "def refuse(**_): raise SystemExit('entry points were read at import')\n"
        "m.entry_points = refuse\n"
        "import prefixloom.compose.registry, prefixloom.compose\n"
        "print(sorted(n for n in sys.modules if n == 'torch' or n.startswith('prefixloom_')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_default_registry_is_made_once_and_by_demand() -> None:
    assert default_registry() is default_registry()
