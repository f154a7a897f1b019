"""The conformance suite of storage backends: laws as plain functions, run against a case that knows how to open one.

    from prefixloom.testing.storage import BackendCase, parametrize_with_checks

    @parametrize_with_checks([BackendCase("mine", lambda capacity: MyBackend(capacity))])
    def test_conformance(case, check):
        check(case)

Without pytest: ``check_backend(case)``. It imports pytest only to make the decorator, and knows no backend.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from ..errors import CompositionError
from ..storage import Backend, BackendType, opened
from . import laws_of_storage as laws

Check = Callable[["BackendCase"], None]
MIB = 1 << 20


@attrs.frozen
class BackendCase:
    """A backend to be checked.

    ``open``     a new and empty store of about so many bytes
    ``reopen``   closes a store and opens it again, as a later process would; None: it does not outlive its process
    ``abandon``  the same, but the process died: nothing was closed; None: as ``reopen``
    ``damage``   changes what is stored of a key behind the backend's back: byte ``at`` of its payload (negative: of
                 what stands before it) is exclusive-ored with ``mask``; None: there is no way to
    ``small``    a capacity that a few hundred records of 4 KiB overflow
    """

    name: str
    open: Callable[[int], Backend]
    reopen: Callable[[Backend], Backend] | None = None
    abandon: Callable[[Backend], Backend] | None = None
    damage: Callable[[Backend, Any, int, int], None] | None = None
    small: int = MIB

    def lacks(self, check: Check) -> str:
        """Why the check says nothing of this case; "" if it applies."""
        for need in NEEDS.get(check, ()):
            if getattr(self, need) is None:
                return f"{self.name} has no {need}"
        return ""


CHECKS: tuple[Check, ...] = tuple(law for name, law in vars(laws).items() if name.startswith("check_"))
NEEDS: Mapping[Check, tuple[str, ...]] = {
    laws.check_what_was_stored_is_there_after_reopening: ("reopen",),
    laws.check_what_was_stored_is_there_after_the_process_died: ("reopen",),
    laws.check_a_reopened_store_says_that_the_fingerprint_is_another: ("reopen",),
    laws.check_what_was_deleted_stays_deleted_after_reopening: ("reopen",),
    laws.check_damage_is_a_counted_miss: ("damage",),
}


@contextmanager
def installed_case(kind: BackendType, options: Mapping[str, Any]) -> Iterator[BackendCase]:
    """A case of an installed kind of store: each in a folder of its own, if it takes one, where it is found again.

    ``open`` must take ``capacity``, and of a store that lasts ``directory``, ``folder`` or ``path``.
    """
    parameters = inspect.signature(kind.open).parameters
    place = next((name for name in ("directory", "folder", "path") if name in parameters and name not in options), None)
    if "capacity" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise CompositionError(
            f"storage {kind.name!r}: its open takes no capacity, and the laws are of one that has one"
        )
    homes: dict[int, tuple[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="prefixloom-store-") as root:

        def at(folder: str, capacity: int) -> Backend:
            where = {place: Path(folder) / "store"} if place else {}
            backend = opened(kind, capacity=capacity, **where, **options)
            homes[id(backend)] = folder, capacity
            return backend

        def reopen(backend: Backend) -> Backend:
            backend.close()
            return at(*homes[id(backend)])

        yield BackendCase(
            kind.name, lambda capacity: at(tempfile.mkdtemp(dir=root), capacity), reopen if place else None
        )


@attrs.frozen
class Report:
    """What was checked, and what was not and why."""

    passed: tuple[str, ...]
    skipped: Mapping[str, str]


def check_backend(case: BackendCase, checks: Iterable[Check] = CHECKS) -> Report:
    """Run every law that applies; the first that is broken raises, naming itself."""
    passed, skipped = [], {}
    for check in checks:
        lacking = case.lacks(check)
        if lacking:
            skipped[check.__name__] = lacking
            continue
        try:
            check(case)
        except Exception as error:
            error.add_note(f"law {check.__name__} of backend {case.name}") if hasattr(error, "add_note") else None
            raise
        passed.append(check.__name__)
    return Report(tuple(passed), skipped)


def parametrize_with_checks(cases: Iterable[BackendCase], expected_failures: Mapping[str, str] | None = None) -> Any:
    """A decorator of a test that takes (case, check). Expected failures have the law's name and a reason."""
    import pytest

    expected = dict(expected_failures or {})
    unknown = set(expected) - {check.__name__ for check in CHECKS}
    if unknown:
        raise ValueError(f"no laws of these names: {', '.join(sorted(unknown))}")
    out = []
    for case in cases:
        for check in CHECKS:
            marks = []
            if case.lacks(check):
                marks.append(pytest.mark.skip(reason=case.lacks(check)))
            if check.__name__ in expected:
                marks.append(pytest.mark.xfail(reason=expected[check.__name__], strict=True))
            out.append(pytest.param(case, check, id=f"{case.name}-{check.__name__[6:]}", marks=marks))
    return pytest.mark.parametrize(("case", "check"), out)
