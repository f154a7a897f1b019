"""Stand-ins for modules that a peer imports beside its cache manager and never calls: kernels for GPUs, parsers.

A stand-in lets itself be imported, subclassed, subscripted and used as a decorator, for that is what happens while a
peer is imported. Once they are ``sealed``, a call of one raises: nothing that is timed may run on a stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_sealed = False


def _is_private(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _called(name: str) -> None:
    if _sealed:
        raise NotImplementedError(f"{name} is a stand-in; what is measured must not call it")


class _Thing:
    """What a name of a stand-in module is."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _called(self.name)
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Thing):
            return args[0]  # a decorator
        return _Thing(f"{self.name}()")

    def __getattr__(self, name: str) -> Any:
        if _is_private(name):
            raise AttributeError(name)
        return _Thing(f"{self.name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return _Thing(f"{self.name}[]")

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


class _Kind(type):
    """A class of a stand-in module: what is looked up in it is there."""

    def __getattr__(cls, name: str) -> Any:
        if _is_private(name):
            raise AttributeError(name)
        return _Thing(f"{cls.__name__}.{name}")


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99"  # newer than whatever is asked for
        if _is_private(name):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        looks_like_a_class = name[0].isupper() and not name.isupper()
        found = sys.modules.get(full) or (_Kind(name, (), {"__init__": _init}) if looks_like_a_class else _Thing(full))
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: Iterable[str]) -> None:
        self.roots = tuple(roots)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(name == root or name.startswith(root + ".") for root in self.roots):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(*roots: str) -> None:
    """From here on, these modules and all below them are stand-ins, installed or not: what is installed wants a GPU."""
    sys.meta_path.insert(0, _Finder(roots))


def sealed(whether: bool) -> None:
    """From here on, whether a stand-in that is called raises."""
    global _sealed
    _sealed = whether
