"""How an engine is imported without a GPU: stand-ins take the place of modules that its cache manager never calls.

While an engine is imported, its code imports, subclasses and subscripts these modules' names, and uses them as
decorators. A stand-in allows all of this. After ``sealed(True)``, a call of a stand-in raises: nothing that is timed
may use one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_sealed = False


class EngineUnavailable(ImportError):
    """An engine cannot be imported here, or not measured. The message says why, or what to install."""


@contextmanager
def imported(engine: str, release: str, *roots: str) -> Iterator[None]:
    """Import an engine in the block, with stand-ins for the modules ``roots``, which are sealed at its end."""
    sealed(False)
    stand_in(*roots)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise EngineUnavailable(
            f"{engine} cannot be imported here ({error}), get it by `pip install --no-deps {engine}=={release}` beside "
            f"what its cache manager imports, as docs/peers.md says"
        ) from error
    sealed(True)


def version_of(engine: str, name: str) -> str:
    """Return the name and version of an engine that is installed, or unpacked on the path."""
    try:
        return f"{name} {metadata.version(engine)}"
    except metadata.PackageNotFoundError:
        return f"{name} {import_module(engine).__version__}"


def _is_private(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _called(name: str) -> None:
    """Raise if the stand-ins are sealed."""
    if _sealed:
        raise NotImplementedError(f"{name} is a stand-in; what is measured must not call it")


class StandIn:
    """The value of a name in a stand-in module."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _called(self.name)
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], StandIn):
            return args[0]  # a decorator
        return StandIn(f"{self.name}()")

    def __getattr__(self, name: str) -> Any:
        if _is_private(name):
            raise AttributeError(name)
        return StandIn(f"{self.name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return StandIn(f"{self.name}[]")

    def __or__(self, other: Any) -> Any:  # in annotations
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    _called(type(self).__name__)


class StandInClass(type):
    """A class in a stand-in module. It has every attribute that is looked up."""

    def __getattr__(cls, name: str) -> Any:
        if _is_private(name):
            raise AttributeError(name)
        return StandIn(f"{cls.__name__}.{name}")


class StandInModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99"  # newer than any version that a peer requires
        if _is_private(name):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        looks_like_a_class = name[0].isupper() and not name.isupper()
        found = sys.modules.get(full) or (
            StandInClass(name, (), {"__init__": _init}) if looks_like_a_class else StandIn(full)
        )
        setattr(self, name, found)
        return found


class StandInFinder(MetaPathFinder, Loader):
    def __init__(self, roots: Iterable[str]) -> None:
        self.roots = tuple(roots)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(name == root or name.startswith(root + ".") for root in self.roots):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(*roots: str) -> None:
    """Replace these modules and their submodules by stand-ins, even if they are installed: those would need a GPU."""
    sys.meta_path.insert(0, StandInFinder(roots))


def sealed(whether: bool) -> None:
    """Let a call of a stand-in raise from now on, or not."""
    global _sealed
    _sealed = whether
