"""Faults in the events of a fleet. Python imports this when a process starts whose PYTHONPATH has this folder.

``FLEET_EVENTS=lies``  the first replica of the fleet does not announce what it evicts: it says that it has everything
                       that it ever had. It writes its process's number to the file ``FLEET_LIAR``, which must not exist
``FLEET_EVENTS=late``  after the first events of a replica, the others come an hour late: nothing comes in a test
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lie(module: ModuleType) -> None:
    """Of ``prefixloom_events.mirror``, in a replica."""
    honest = module.Mirror.apply
    is_liar: list[bool] = []

    def apply(mirror: Any, changes: Any) -> Any:
        if not is_liar:
            try:
                with open(os.environ["FLEET_LIAR"], "x") as file:
                    file.write(str(os.getpid()))
                is_liar.append(True)
            except FileExistsError:
                is_liar.append(False)
        return honest(mirror, [each for each in changes if each.kind != "removed"] if is_liar[0] else changes)

    module.Mirror.apply = apply


def delay(module: ModuleType) -> None:
    """Of ``prefixloom_events.follower``, in the front."""
    honest, answers = module.EventFollower.receive, module.EventFollower.answers

    def receive(follower: Any) -> Any:
        return honest(follower) if follower.stream.expected < 2 else None

    def answer(follower: Any, *asked: Any) -> Any:
        return answers(follower, *asked) if follower.stream.expected < 2 else None

    module.EventFollower.receive, module.EventFollower.answers = receive, answer


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``change`` with a module when it was imported."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if os.environ.get("FLEET_EVENTS") == "lies":
    sys.meta_path.insert(0, AfterImport("prefixloom_events.mirror", lie))
if os.environ.get("FLEET_EVENTS") == "late":
    sys.meta_path.insert(0, AfterImport("prefixloom_events.follower", delay))
