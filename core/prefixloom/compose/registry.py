"""Registry: the installed plugins of this process, found through entry points and loaded only when selected.

The entry-point group is ``prefixloom``. A component's entry is named by its kind alone; other offers have a prefix:
``policy:NAME``, ``admission:NAME``, ``storage:NAME``, ``session:NAME``. The target is a module, or an instance, with
``@hookimpl`` functions. The registry knows names, distributions and their answers; it knows no component by name, no
model and no cache.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint
from typing import Any, Literal, TypeVar

import attrs
import pluggy

from ..cache.session import SessionPlugin
from ..contract.admission import ADMISSIONS, AdmissionPolicy
from ..contract.hookspecs import API_VERSION, COLD_HOOKS, FIRST_API, PROJECT, RegistrySpecs
from ..contract.policy import BUILT_IN, EvictionPolicy
from ..contract.values import ComponentType
from ..errors import CompositionError
from ..storage import Backend, BackendType, opened, shown_url
from .binding import naming, refuse_order, shown

GROUP = "prefixloom"

T = TypeVar("T", ComponentType, EvictionPolicy, AdmissionPolicy, BackendType)

OfferKind = Literal["component", "policy", "admission", "storage", "session"]

TYPES: Mapping[OfferKind, type | None] = {
    "component": ComponentType,
    "policy": EvictionPolicy,
    "admission": AdmissionPolicy,
    "storage": BackendType,
    "session": None,
}
"""The kinds of offers, and the type of each answer. None: the plugin is asked later, for each model."""

TAKEN: Mapping[str, Iterable[str]] = {"policy": BUILT_IN, "admission": ADMISSIONS}
"""The built-in names, which no plugin may take."""


@attrs.frozen
class Offer:
    """One installed offer. ``reason`` says why a broken one cannot be used."""

    offer: str
    name: str
    distribution: str
    version: str
    status: Literal["ok", "broken"]
    reason: str = ""
    summary: str = ""
    layer_kinds: tuple[str, ...] = ()


@attrs.define(eq=False, slots=False)
class _Entry:
    """An entry point with its parsed name and its distribution. Its plugin is imported on first use."""

    offer: str
    name: str
    distribution: str
    version: str
    point: EntryPoint

    @classmethod
    def of(cls, point: EntryPoint) -> _Entry:
        offer, colon, name = point.name.partition(":")
        if not colon:
            offer, name = "component", offer
        try:
            told: Any = point.dist.metadata  # type: ignore[union-attr]
            distribution, version = (str(told.get(field) or "") for field in ("Name", "Version"))
        except Exception:  # without a distribution, or without metadata that can be read
            distribution = version = ""
        return cls(offer.strip(), name.strip(), distribution, version, point)

    @property
    def source(self) -> str:
        """The distribution in words."""
        if not self.distribution:
            return "a distribution without a name"
        return f"distribution {self.distribution} {self.version}".rstrip()

    @property
    def owner(self) -> str:
        """The identity of the entry's owner: entries with the same name and owner are one entry, found twice."""
        return re.sub(r"[-_.]+", "-", self.distribution).lower() or f"= {self.point.value}"

    def __str__(self) -> str:
        return f"{self.offer} {self.name!r} ({self.source}, entry point {self.point.value!r})"

    @functools.cached_property
    def manager(self) -> pluggy.PluginManager:
        """The manager of the target's hooks, one for each target: plugins cannot disturb each other."""
        if self.offer not in TYPES:
            raise CompositionError(
                f"{self} is of no kind that prefixloom knows: name the entry point by the component's kind, or "
                + ", ".join(f"{kind}:NAME" for kind in TYPES if kind != "component")
            )
        try:
            target = self.point.load()
        except (Exception, SystemExit) as error:
            raise CompositionError(
                f"{self} failed to import: {shown(error)}. Install what it needs, or uninstall it"
            ) from error
        if target is None or inspect.isclass(target):  # the hooks of a class have no self
            raise CompositionError(f"{self} points to {target!r}. Point it to a module with hooks, or to an instance")
        self._check_version(target)  # before its hooks, which may have other names or arguments in another version
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(RegistrySpecs)
        as_in = "Its hooks must be named and take arguments as in prefixloom.contract.hookspecs.RegistrySpecs"
        with naming(self, "does not fit the hook specifications", as_in):
            manager.register(target, name=self.name)
            manager.check_pending()
        for attribute in dir(target):
            refuse_order(manager.parse_hookimpl_opts(target, attribute) or {}, attribute, str(self))
        for hook in COLD_HOOKS:
            if getattr(manager.hook, hook).get_hookimpls():
                continue
            if callable(getattr(target, hook, None)):
                raise CompositionError(f"{self}: decorate its {hook} with @hookimpl, so that it is called")
            if hook == f"prefixloom_{self.offer}":
                raise CompositionError(
                    f"{self} promises {hook} by its name and does not implement it. Define {hook} there"
                )
        return manager

    def _check_version(self, target: object) -> None:
        """Refuse a target of another major version of the contract. One without a version is of the first."""
        built = getattr(target, "prefixloom_api", FIRST_API)
        if built == API_VERSION and type(built) is int:
            return
        if type(built) is not int:
            remedy = "prefixloom_api must be a whole number: report it there"
        elif built > API_VERSION:
            remedy = "Upgrade prefixloom"
        else:
            remedy = f"Upgrade {self.distribution or 'the plugin'}, or install a prefixloom of version {built}"
        raise CompositionError(
            f"{self} was built for version {built!r} of the plugin contract and this prefixloom speaks version "
            f"{API_VERSION}. {remedy}"
        )

    def ask(self, hook: str, **arguments: object) -> object:
        """Return the answer of a hook. The error for what it raises names the plugin."""
        caller = getattr(self.manager.hook, hook)
        given = f" with {arguments!r}" if arguments else ""
        with naming(self, f"raised in {hook}{given}", "Report it there, or uninstall it"):
            answer = caller(**arguments)
        if caller.spec.opts["firstresult"]:
            return answer
        return answer[0] if answer else None

    @functools.cached_property
    def answer(self) -> object:
        """Return what the plugin offers, checked; None for a kind that is asked later."""
        assert self.manager is not None  # an entry of no known kind is refused here
        hook, wanted = f"prefixloom_{self.offer}", TYPES[self.offer]  # type: ignore[index]
        if wanted is None:
            return None
        answer = self.ask(hook)
        if not isinstance(answer, wanted):
            raise CompositionError(f"{self}: {hook} answered {answer!r}, and it must return one {wanted.__name__}")
        name = getattr(answer, "kind", None) or getattr(answer, "name", None)
        if name != self.name:
            raise CompositionError(
                f"{self} answered a {wanted.__name__} called {name!r}: the entry point and its answer must agree on "
                f"the name. Change one of them"
            )
        if self.name in TAKEN.get(self.offer, ()):
            raise CompositionError(f"{self} takes the name of a built-in policy. Ask it to register under another name")
        return answer


class Registry:
    """The offers of the installed distributions. A plugin is imported on first use; answers are kept."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._given = None if entry_points is None else tuple(entry_points)

    def component(self, kind: str) -> ComponentType:
        """Return the component type that is registered as ``kind``. Its plugin is imported on first use."""
        return self._typed("component", ComponentType, kind)

    def policy(self, name: str) -> EvictionPolicy:
        """Return the eviction policy that a distribution offers as ``name``."""
        return self._typed("policy", EvictionPolicy, name)

    def admission(self, name: str) -> AdmissionPolicy:
        """Return the admission policy that a distribution offers as ``name``."""
        return self._typed("admission", AdmissionPolicy, name)

    def storage(self, name: str) -> BackendType:
        """Return the kind of store that a distribution offers as ``name``."""
        return self._typed("storage", BackendType, name)

    def truth(self, kind: str, options: Mapping[str, object]) -> Any:
        """Return what a distribution says of the layers that its component with these options serves; None: nothing."""
        entry = self._select("component", kind)
        if not entry.manager.hook.prefixloom_truth.get_hookimpls():
            return None
        answer = entry.ask("prefixloom_truth", options=dict(options))
        if answer is None:
            raise CompositionError(
                f"{entry}: prefixloom_truth answered None to the options {dict(options)!r}. It must return a "
                f"prefixloom.testing.Truth; leave the function out if nothing can be said"
            )
        return answer

    def session_plugins(self) -> tuple[SessionPlugin, ...]:
        """Return the installed adapters of models, in the order of their names. One that fails to load is an error."""
        entries = [self._select("session", name) for name in self.names("session")]
        return tuple(SessionPlugin(entry.name, entry.source, entry.manager) for entry in entries)

    def names(self, offer: OfferKind) -> tuple[str, ...]:
        """Return the installed names of one kind of offer. Nothing is imported."""
        return tuple(sorted(name for kind, name in self._entries if kind == offer))

    def source(self, offer: OfferKind, name: str) -> str:
        """Return the distribution that makes an offer, in words for an error."""
        return self._select(offer, name).source

    def kinds_by_layer(self) -> Mapping[str, tuple[str, ...]]:
        """Return layer kind -> the component kinds that serve it. Every component plugin is imported.

        A broken plugin serves nothing here; ``offers`` gives the reason.
        """
        served: dict[str, list[str]] = {}
        for offer in self._checked("component"):
            for layer_kind in offer.layer_kinds:
                served.setdefault(layer_kind, []).append(offer.name)
        return {layer_kind: tuple(served[layer_kind]) for layer_kind in sorted(served)}

    def offers(self) -> tuple[Offer, ...]:
        """Return all installed offers, loaded and checked, with the reason for each one that does not work."""
        kinds = dict.fromkeys([*TYPES, *sorted(kind for kind, _ in self._entries)])
        return tuple(offer for kind in kinds for offer in self._checked(kind))

    # ------------------------------------------------------------ finding

    @functools.cached_property
    def _entries(self) -> dict[tuple[str, str], tuple[_Entry, ...]]:
        """Return the entries by (offer, name), one per distribution. More than one for a name is a conflict."""
        points = importlib.metadata.entry_points(group=GROUP) if self._given is None else self._given
        found: dict[tuple[str, str], dict[str, _Entry]] = {}
        for entry in map(_Entry.of, points):
            # Python imports the first one on the path; the same distribution may be found again further on.
            found.setdefault((entry.offer, entry.name), {}).setdefault(entry.owner, entry)
        return {key: tuple(owners.values()) for key, owners in found.items()}

    def _select(self, offer: str, name: str) -> _Entry:
        entries = self._entries.get((offer, name), ())
        if len(entries) == 1:
            return entries[0]
        if entries:
            raise CompositionError(
                f"{offer} {name!r} is offered by {len(entries)} distributions: "
                + ", ".join(sorted(entry.source for entry in entries))
                + ". Uninstall all but one, or ask one of them to register under another name"
            )
        installed = sorted(known for kind, known in self._entries if kind == offer)
        close = get_close_matches(name, installed, n=2)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        what = f"an {offer}" if offer == "admission" else f"a {offer}"
        raise CompositionError(
            f"no installed distribution offers {what} named {name!r}.{hint} Installed: "
            f"{', '.join(installed) or 'none'}. Install the package that registers it in the entry-point group "
            f"{GROUP!r}; `prefixloom components` lists what is there"
        )

    def _typed(self, offer: OfferKind, wanted: type[T], name: str) -> T:
        answer = self._select(offer, name).answer
        assert isinstance(answer, wanted)
        return answer

    def _checked(self, offer: str) -> tuple[Offer, ...]:
        """Return the entries of one kind of offer, loaded, with their status."""
        out: list[Offer] = []
        for (kind, name), entries in sorted(self._entries.items()):
            if kind != offer:
                continue
            reason, answer = "", None
            try:
                answer = self._select(offer, name).answer
            except CompositionError as error:
                reason = str(error)
            out += [
                Offer(
                    offer, name, entry.distribution, entry.version, "broken" if reason else "ok", reason,
                    getattr(answer, "summary", ""), tuple(sorted(getattr(answer, "layer_kinds", ()))),
                )
                for entry in entries
            ]  # fmt: skip
        return tuple(out)


@functools.cache
def default_registry() -> Registry:
    """Return the registry of this process, made on first use."""
    return Registry()


def make_component(kind: str, name: str = "", **options: Any) -> Any:
    """Make the component that is installed as ``kind``, with its own options, to give it to ``compose``."""
    return default_registry().component(kind).make(name or kind, **options)


def open_store(name: str, **options: Any) -> Backend:
    """Open the store that is installed as ``storage:NAME``, with its own options. StorageError: it cannot be used.

    ``name`` may be a URL, whose scheme is NAME, such as ``file:/var/cache/prefixes?capacity=20GiB``; all that the store
    needs to know stands in it.
    """
    if not isinstance(name, str):
        raise CompositionError(f"a store is named by a text, its name or a URL, got {name!r}")
    scheme, colon, _ = name.partition(":")
    if colon and options:
        told = ", ".join(options)
        raise CompositionError(f"{shown_url(name)!r} says all of its store, so it takes no {told} beside it")
    kind = default_registry().storage(scheme)
    return opened(kind, name if colon else "", **options)
