"""Answers: what a component says, as text, in this process and in another one, on a machine of its own.

The other process imports no pytest, and torch only if the component does. It makes the component anew, and asks it what
was asked here.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ...compose.binding import bind
from ...contract.values import Component
from .case import ComponentCase, made
from .machines import Machine, on_machine

BOUNDARIES = (*range(40), 63, 64, 65, 255, 256, 257, 1000, 4095, 4096, 4097, 100_000)
"""The numbers at which the reach is asked."""
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK")
"""Variables of the environment that tell the processes of one model apart: another process has others."""
NAMES = ("HOSTNAME", "USER", "LOGNAME", "CUDA_VISIBLE_DEVICES")
"""Variables that tell machines apart."""
ASKS = "from prefixloom.testing.kit.answers import answer; answer()"
"""What the other process runs."""


def shown(answer: Any) -> str:
    """Return an answer as text that does not depend on where in memory, or in which order of a set, something lies."""
    if callable(answer):
        return "a function"
    if isinstance(answer, set | frozenset):
        return f"{{{', '.join(sorted(map(shown, answer)))}}}"
    if isinstance(answer, dict):
        return f"{{{', '.join(sorted(f'{shown(key)}: {shown(value)}' for key, value in answer.items()))}}}"
    if isinstance(answer, tuple | list):
        return f"({', '.join(map(shown, answer))})"
    if attrs.has(type(answer)):
        fields = (field.name for field in attrs.fields(type(answer)) if field.repr)
        return f"{type(answer).__name__}({', '.join(f'{name}={shown(getattr(answer, name))}' for name in fields)})"
    said = repr(answer)
    return type(answer).__name__ if " at 0x" in said else said


@attrs.frozen
class Call:
    """One call of a hook, and its answer as text."""

    hook: str
    args: tuple[Any, ...]
    answer: str

    def __str__(self) -> str:
        return f"{self.hook}({', '.join(map(repr, self.args))}) -> {self.answer}"


def facts_of(component: Any) -> list[str]:
    """Return what a component says of itself, as text."""
    said = [f"name is {component.name!r}", f"manifest is {shown(component.manifest)}"]
    for n in BOUNDARIES:
        said.append(f"needs({n}) is {shown(component.reach.needs(n))}")
        said.append(f"until({n}) is {shown(component.reach.until(n))}")
    return said


# ---------------------------------------------------------------- another process


class CannotBeMade(Exception):
    """Another process cannot make this component; the text says why."""


@attrs.frozen
class Asking:
    """What another process needs to make the component, and what it is asked. ``blob``: a pickled instance.

    ``torch``: whether the component's modules import it, so that it is there before the machine is.
    """

    path: tuple[str, ...]
    modules: tuple[tuple[str, str], ...]
    installed: tuple[str, dict[str, Any]] | None
    blob: bytes
    calls: bytes
    torch: bool


class _Pickler(pickle.Pickler):
    """A pickler that notes the modules of all that it pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}

    def persistent_id(self, value: Any) -> None:
        kind = value if isinstance(value, type) else type(value)
        self.modules[getattr(value, "__module__", None) or kind.__module__] = None


def _pickled(value: Any) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return a pickled object, and the modules that another process must import for it, each with its file."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    if "__main__" in pickler.modules:
        raise CannotBeMade("it is defined in the program that was started, and not in a module")
    files = ((name, getattr(sys.modules.get(name), "__file__", None) or "") for name in pickler.modules)
    return file.getvalue(), tuple(files)


def request_of(case: ComponentCase, calls: Sequence[Call]) -> Asking:
    """Return what another process is asked. CannotBeMade: it could not make the component."""
    asked = pickle.dumps([(call.hook, call.args) for call in calls])
    path = tuple(entry or os.getcwd() for entry in sys.path)
    component = case.component()
    own = {getattr(kind, "__module__", "") for each in (component, component.reach) for kind in type(each).__mro__}
    torch = any(hasattr(sys.modules.get(name), "torch") for name in own)
    if case.source is not None:
        return Asking(path, (), case.source, b"", asked, torch)
    try:
        blob, modules = _pickled(made(case))
    except CannotBeMade:
        raise
    except Exception as error:
        raise CannotBeMade(f"it cannot be pickled ({error})") from error
    return Asking(path, modules, None, blob, asked, torch)


def elsewhere(request: Asking, seed: int) -> list[str | None]:
    """Return what another process says: the facts, then the answer to each call, None where it raised.

    CannotBeMade: there is no answer.
    """
    others = {**dict.fromkeys(RANKS, str(seed % 7 + 2)), **dict.fromkeys(NAMES, f"other{seed}")}
    environment = {**os.environ, **others, "PYTHONHASHSEED": str(seed + 1), "TZ": f"UTC+{seed % 12}"}
    given = pickle.dumps((request.path, seed, attrs.asdict(request, recurse=False)))
    try:
        call = [sys.executable, "-c", ASKS]
        done = subprocess.run(call, input=given, env=environment, capture_output=True, check=True)
        said: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CannotBeMade(f"another process says {' '.join(last)!r}") from error
    except (OSError, ValueError, IndexError) as error:
        raise CannotBeMade(f"another process does not answer ({error})") from error
    return said


def answer() -> None:
    """Be the other process: read a request, and write the answers as the last line."""
    path, seed, fields = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    request = Asking(**fields)
    if request.torch:
        importlib.import_module("torch").manual_seed(seed)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    with on_machine(Machine(seed)):
        if request.installed is not None:
            name, options = request.installed
            component = ComponentCase.installed(name, **options).component()
        else:
            for name, file in request.modules:
                _import(name, file)
            component = pickle.loads(request.blob)
        said: list[str | None] = [*facts_of(component), *_asked(component, pickle.loads(request.calls))]
    sys.stdout.write("\n" + json.dumps(said) + "\n")


def _import(name: str, file: str) -> None:
    """Import a module by its name or, where it has none that is known here, from its file."""
    try:
        importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _asked(component: Any, calls: list[tuple[str, tuple[Any, ...]]]) -> list[str | None]:
    """Return the answers to these calls, None where a hook raises: it may look at a pool, and there is none here."""
    hooks = bind(component, f"component {component.name!r}")
    validator: Callable[..., Any] | None = None
    said: list[str | None] = []
    for hook, args in calls:
        function = validator if hook == "the validator" else getattr(hooks, hook)
        try:
            got = function(*args)  # type: ignore[misc]
        except Exception:
            said.append(None)
            continue
        if hook == "create_match_validator":
            validator = got
        said.append(shown(got))
    return said


def has_code(case: ComponentCase) -> bool:
    """Return whether a component has code of its own that answers: hooks, or a reach that is not the core's."""
    component = case.component()
    home = __name__.partition(".")[0]
    return type(component) is not Component or not type(component.reach).__module__.startswith(f"{home}.contract")
