"""Registry: the installed plugins of this process, found through entry points and loaded only when selected.

The entry-point group is ``prefixloom``. A component's entry is named by its kind alone; other offers have a prefix:
``profile:NAME``, ``policy:NAME``, ``admission:NAME``, ``storage:NAME``, ``session:NAME``. The target is a module, or an
instance, with ``@hookimpl`` functions. The registry knows names, distributions and their answers; it knows no
component by name, no model and no cache.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, Protocol

import attrs
import pluggy

from ..cache.session import SessionPlugin
from ..contract.admission import ADMISSIONS, AdmissionPolicy
from ..contract.hookspecs import API_VERSION, FIRST_API, PROJECT, RegistrySpecs
from ..contract.policy import BUILT_IN, EvictionPolicy
from ..contract.values import ComponentType, Profile
from ..errors import CompositionError
from ..storage import Backend, BackendType, opened, opened_by_url
from .binding import refuse_order

GROUP = "prefixloom"

OfferKind = Literal["component", "profile", "policy", "admission", "storage", "session"]

OFFER_KINDS: tuple[OfferKind, ...] = ("component", "profile", "policy", "admission", "storage", "session")

TYPES: Mapping[str, type[ComponentType | EvictionPolicy | AdmissionPolicy | BackendType]] = {
    "component": ComponentType,
    "policy": EvictionPolicy,
    "admission": AdmissionPolicy,
    "storage": BackendType,
}
"""The type that the answer to each kind of offer must have."""

TAKEN: Mapping[str, Iterable[str]] = {"policy": BUILT_IN, "admission": ADMISSIONS}
"""The built-in names, which no plugin may take."""


class EntryPointLike(Protocol):
    """The part of an entry point that the registry uses, with an optional ``dist``, the distribution."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> str: ...

    def load(self) -> Any: ...


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


@attrs.frozen
class _Entry:
    """An entry point with its parsed name and its distribution."""

    offer: str
    name: str
    distribution: str
    version: str
    point: EntryPointLike

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


@attrs.frozen
class ProfilePlugin:
    """A reader of model configs that a distribution offers."""

    name: str
    source: str
    manager: pluggy.PluginManager = attrs.field(eq=False, repr=False)

    def read(self, config: Mapping[str, Any]) -> Profile | None:
        """The profile for this config, or None if the plugin does not know it."""
        try:
            answer = self.manager.hook.prefixloom_profile(model_config=dict(config))
        except Exception as error:
            raise CompositionError(
                f"profile plugin {self.name!r} ({self.source}) raised {_shown(error)} on this model config: report it "
                f"there, or pass a Profile of your own to compose()"
            ) from error
        if answer is not None and not isinstance(answer, Profile):
            raise CompositionError(
                f"profile plugin {self.name!r} ({self.source}) answered {answer!r}: prefixloom_profile must return a "
                f"Profile, or None for a config that it does not know"
            )
        return answer


ASKED_LATER: Mapping[str, type[ProfilePlugin | SessionPlugin]] = {"profile": ProfilePlugin, "session": SessionPlugin}
"""Offers whose hook is not called when they are loaded, but for each config or each model."""


class Registry:
    """The offers of the installed distributions. A plugin is imported on first use; answers are kept."""

    def __init__(self, entry_points: Iterable[EntryPointLike] | None = None) -> None:
        self._given = None if entry_points is None else tuple(entry_points)
        self._found: dict[tuple[str, str], tuple[_Entry, ...]] | None = None
        self._answers: dict[tuple[str, str], Any] = {}

    def component(self, kind: str) -> ComponentType:
        """Return the component type that is registered as ``kind``. Its plugin is imported on first use."""
        answer = self._answer("component", kind)
        assert isinstance(answer, ComponentType)
        return answer

    def truth(self, kind: str, options: Mapping[str, Any]) -> Any:
        """What a distribution says of the layers that its component with these options serves; None: nothing."""
        entry = self._select("component", kind)
        target = _target(entry)
        manager = _register(entry, target, "prefixloom_component")
        says = bool(manager.hook.prefixloom_truth.get_hookimpls())
        if callable(getattr(target, "prefixloom_truth", None)) and not says:
            raise CompositionError(f"{entry}: decorate its prefixloom_truth with @hookimpl")
        try:
            answer = manager.hook.prefixloom_truth(options=dict(options))
        except Exception as error:
            raise CompositionError(
                f"{entry}: prefixloom_truth raised {_shown(error)}; it was given the options {dict(options)!r}. Report "
                f"it there"
            ) from error
        if says and answer is None:
            raise CompositionError(
                f"{entry}: prefixloom_truth answered None to the options {dict(options)!r}. It must return a "
                f"prefixloom.testing.Truth; leave the function out if nothing can be said"
            )
        return answer

    def policy(self, name: str) -> EvictionPolicy:
        """The eviction policy that a distribution offers as ``name``."""
        answer = self._answer("policy", name)
        assert isinstance(answer, EvictionPolicy)
        return answer

    def admission(self, name: str) -> AdmissionPolicy:
        """The admission policy that a distribution offers as ``name``."""
        answer = self._answer("admission", name)
        assert isinstance(answer, AdmissionPolicy)
        return answer

    def storage(self, name: str) -> BackendType:
        """The kind of store that a distribution offers as ``name``."""
        answer = self._answer("storage", name)
        assert isinstance(answer, BackendType)
        return answer

    def profile_plugins(self) -> tuple[ProfilePlugin, ...]:
        """The installed readers of model configs, in the order of their names. One that fails to load is an error."""
        return tuple(self._answer("profile", name) for name in self.names("profile"))

    def session_plugins(self) -> tuple[SessionPlugin, ...]:
        """The installed adapters of models, in the order of their names. One that cannot be loaded is an error."""
        return tuple(self._answer("session", name) for name in self.names("session"))

    def names(self, offer: OfferKind) -> tuple[str, ...]:
        """The installed names of one kind of offer. Nothing is imported."""
        return tuple(sorted(name for kind, name in self._entries() if kind == offer))

    def source(self, offer: OfferKind, name: str) -> str:
        """The distribution that makes an offer, in words for an error."""
        return self._select(offer, name).source

    def kinds_by_layer(self) -> Mapping[str, tuple[str, ...]]:
        """Layer kind -> the component kinds that serve it. Every component plugin is imported.

        A broken plugin serves nothing here; ``offers`` gives the reason.
        """
        served: dict[str, list[str]] = {}
        for offer in self._checked("component"):
            for layer_kind in offer.layer_kinds:
                served.setdefault(layer_kind, []).append(offer.name)
        return {layer_kind: tuple(served[layer_kind]) for layer_kind in sorted(served)}

    def offers(self) -> tuple[Offer, ...]:
        """All installed offers, loaded and checked, with the reason for each one that does not work."""
        known = tuple(offer for kind in OFFER_KINDS for offer in self._checked(kind))
        unknown = sorted(kind for kind, _ in self._entries() if kind not in OFFER_KINDS)
        return known + tuple(offer for kind in dict.fromkeys(unknown) for offer in self._checked(kind))

    # ------------------------------------------------------------ finding

    def _entries(self) -> dict[tuple[str, str], tuple[_Entry, ...]]:
        """The entries by (offer, name), one per distribution. More than one for a name is a conflict."""
        if self._found is None:
            points = importlib.metadata.entry_points(group=GROUP) if self._given is None else self._given
            found: dict[tuple[str, str], dict[str, _Entry]] = {}
            for point in points:
                entry = _entry(point)
                # Python imports the first one on the path; the same distribution may be found again further on.
                found.setdefault((entry.offer, entry.name), {}).setdefault(entry.owner, entry)
            self._found = {key: tuple(owners.values()) for key, owners in found.items()}
        return self._found

    def _select(self, offer: str, name: str) -> _Entry:
        entries = self._entries().get((offer, name))
        if not entries:
            raise self._unknown(offer, name)
        if len(entries) > 1:
            raise CompositionError(
                f"{offer} {name!r} is offered by {len(entries)} distributions: "
                + ", ".join(sorted(entry.source for entry in entries))
                + ". Uninstall all but one, or ask one of them to register under another name"
            )
        return entries[0]

    def _unknown(self, offer: str, name: str) -> CompositionError:
        installed = sorted(known for kind, known in self._entries() if kind == offer)
        close = get_close_matches(name, installed, n=2)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        listed = ", ".join(installed) if installed else "none"
        what = f"an {offer}" if offer == "admission" else f"a {offer}"
        return CompositionError(
            f"no installed distribution offers {what} named {name!r}.{hint} Installed: {listed}. Install the "
            f"package that registers it in the entry-point group {GROUP!r}; `prefixloom components` lists what is there"
        )

    # ------------------------------------------------------------ loading

    def _answer(self, offer: str, name: str) -> Any:
        key = (offer, name)
        if key not in self._answers:
            self._answers[key] = _load(self._select(offer, name))
        return self._answers[key]

    def _checked(self, offer: str) -> tuple[Offer, ...]:
        """The entries of one kind of offer, loaded, with their status."""
        out: list[Offer] = []
        for (kind, name), entries in sorted(self._entries().items()):
            if kind != offer:
                continue
            reason, summary = "", ""
            layer_kinds: tuple[str, ...] = ()
            try:
                answer = self._answer(offer, name)
                if isinstance(answer, ComponentType | BackendType):
                    summary = answer.summary
                if isinstance(answer, ComponentType):
                    layer_kinds = tuple(sorted(answer.layer_kinds))
            except CompositionError as error:
                reason = str(error)
            for entry in entries:
                status: Literal["ok", "broken"] = "broken" if reason else "ok"
                out.append(Offer(offer, name, entry.distribution, entry.version, status, reason, summary, layer_kinds))
        return tuple(out)


@functools.cache
def default_registry() -> Registry:
    """The registry of this process, made on first use."""
    return Registry()


def make_component(kind: str, name: str = "", **options: Any) -> Any:
    """Make the component that is installed as ``kind``, with its own options, to give it to ``compose``."""
    return default_registry().component(kind).make(name or kind, **options)


def open_store(name: str, **options: Any) -> Backend:
    """Open the store that is installed as ``storage:NAME``, with its own options. StorageError: it cannot be used.

    ``name`` may be a URL, whose scheme is NAME, such as ``file:/var/cache/prefixes?capacity=20GiB``; all that the store
    needs to know stands in it.
    """
    scheme, colon, _ = name.partition(":")
    if colon and options:
        raise CompositionError(f"{name!r} says all of its store, so it takes no {', '.join(options)} beside it")
    kind = default_registry().storage(scheme)
    return opened_by_url(kind, name) if colon else opened(kind, **options)


# ---------------------------------------------------------------- one entry point


def _entry(point: EntryPointLike) -> _Entry:
    offer, colon, name = point.name.partition(":")
    if not colon:
        offer, name = "component", offer
    dist = getattr(point, "dist", None)
    return _Entry(offer.strip(), name.strip(), _metadata(dist, "Name"), _metadata(dist, "Version"), point)


def _metadata(dist: Any, field: str) -> str:
    """A field of a distribution's metadata, which may be missing or damaged."""
    try:
        return str(dist.metadata.get(field) or "") if dist is not None else ""
    except Exception:
        return ""


def _shown(error: BaseException) -> str:
    """An error with its type, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _load(entry: _Entry) -> Any:
    """Load an entry point's target, check it against the specifications, and call the hook for the offer."""
    hook_name = f"prefixloom_{entry.offer}"
    if entry.offer not in OFFER_KINDS:
        raise CompositionError(
            f"{entry} is of no kind that prefixloom knows: name the entry point by the component's kind, or "
            + ", ".join(f"{kind}:NAME" for kind in OFFER_KINDS[1:])
        )
    target = _target(entry)
    _check_version(entry, target)
    manager = _register(entry, target, hook_name)
    asked_later = ASKED_LATER.get(entry.offer)
    if asked_later is not None:
        return asked_later(entry.name, entry.source, manager)
    try:
        answers = getattr(manager.hook, hook_name)()
    except Exception as error:
        raise CompositionError(
            f"{entry}: {hook_name} raised {_shown(error)}. Report it there, or uninstall it"
        ) from error
    answer = answers[0] if answers else None
    if answer is None:
        raise CompositionError(f"{entry}: {hook_name} answered None. It must return its offer; report it there")
    _check_answer(entry, answer)
    return answer


def _target(entry: _Entry) -> object:
    try:
        target = entry.point.load()
    except (Exception, SystemExit) as error:
        raise CompositionError(
            f"{entry} failed to import: {_shown(error)}. Install what it needs, or uninstall it"
        ) from error
    if inspect.isclass(target):
        raise CompositionError(
            f"{entry} points to the class {target.__name__}, whose hooks have no self. Point it to the module, or to "
            f"an instance of the class"
        )
    if target is None:
        raise CompositionError(f"{entry} points to None. Point it to the module with the hooks")
    return target


def _check_version(entry: _Entry, target: object) -> None:
    """Check that the target was built for this major version of the contract. Without a version, it is the first one.

    This check comes before those of its hooks, which may have other names or arguments in another version.
    """
    built = getattr(target, "prefixloom_api", FIRST_API)
    if built == API_VERSION and type(built) is int:
        return
    if type(built) is not int:
        remedy = "prefixloom_api must be a whole number: report it there"
    elif built > API_VERSION:
        remedy = "Upgrade prefixloom"
    else:
        remedy = f"Upgrade {entry.distribution or 'the plugin'}, or install a prefixloom of version {built}"
    raise CompositionError(
        f"{entry} was built for version {built!r} of the plugin contract and this prefixloom speaks version "
        f"{API_VERSION}. {remedy}"
    )


def _register(entry: _Entry, target: object, hook_name: str) -> pluggy.PluginManager:
    """Register the target in a manager of its own, so that plugins cannot disturb each other."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(RegistrySpecs)
    try:
        manager.register(target, name=entry.name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise CompositionError(
            f"{entry} does not fit the hook specifications: {_shown(error)}. Its hooks must be named and take their "
            f"arguments as in prefixloom.contract.hookspecs.RegistrySpecs"
        ) from error
    for attribute in dir(target):
        refuse_order(manager.parse_hookimpl_opts(target, attribute) or {}, attribute, str(entry))
    if not getattr(manager.hook, hook_name).get_hookimpls():
        undecorated = callable(getattr(target, hook_name, None))
        remedy = f"Decorate its {hook_name} with @hookimpl" if undecorated else f"Define {hook_name} there"
        raise CompositionError(f"{entry} promises {hook_name} by its name and does not implement it. {remedy}")
    return manager


def _check_answer(entry: _Entry, answer: object) -> None:
    """Refuse an answer of another type or name than the entry point promises."""
    wanted = TYPES[entry.offer]
    if not isinstance(answer, wanted):
        raise CompositionError(
            f"{entry} answered {answer!r}: prefixloom_{entry.offer} must return one {wanted.__name__}"
        )
    name = answer.kind if isinstance(answer, ComponentType) else answer.name
    if name != entry.name:
        raise CompositionError(
            f"{entry} answered a {wanted.__name__} called {name!r}: the entry point and its answer must agree on the "
            f"name. Change one of them"
        )
    if entry.name in TAKEN.get(entry.offer, ()):
        raise CompositionError(f"{entry} takes the name of a built-in policy. Ask it to register under another name")
