"""The pytest plugin, which checks an installed component against every law, one test for each.

    pytest -p prefixloom.testing.pytest_plugin --component NAME

It imports nothing heavy until the option is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .kit.case import ComponentCase

SUITE = Path(__file__).with_name("pytest_suite.py")
CASES = pytest.StashKey["list[ComponentCase]"]()


def parametrize_with_laws(*cases: ComponentCase) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a test that takes ``(case, law)`` and calls ``law(case)``; it runs once for every law.

    A law that does not apply to a component is skipped, with the reason.
    """
    names, pairs, ids = _pairs(cases)
    return pytest.mark.parametrize(names, pairs, ids=ids)


def _pairs(cases: Iterable[ComponentCase]) -> tuple[tuple[str, str], list[tuple[Any, Any]], list[str]]:
    from .conformance import laws_of, name_of

    pairs = [(case, _Judged(law)) for case in cases for law in laws_of(case)]
    return ("case", "law"), pairs, [f"{case}-{name_of(law._law)}" for case, law in pairs]


class _Judged:
    """A law for a pytest test: it skips where the law does not apply, fails where it is broken, and warns of waste."""

    def __init__(self, law: Any) -> None:
        self._law = law

    def __call__(self, case: ComponentCase) -> None:
        __tracebackhide__ = True
        from .conformance import check_law
        from .kit.case import LawBroken, NotApplicable, Wasteful

        try:
            check_law(self._law, case)
        except NotApplicable as reason:
            pytest.skip(str(reason))
        except Wasteful as cost:
            warnings.warn(f"{case}: {cost}", stacklevel=1)
        except LawBroken as error:
            pytest.fail(str(error), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("prefixloom")
    group.addoption(
        "--component",
        action="append",
        default=[],
        metavar="NAME",
        help="hold this installed prefixloom component against the laws of the conformance kit; may be given again",
    )
    group.addoption(
        "--believe",
        action="store_true",
        help="with --component: believe what only the component itself says of its layers",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep a case for each named component, and run the kit's own suite if no test file is named."""
    names = config.getoption("component")
    if not names:
        return
    from ..errors import PrefixloomError
    from .kit.case import ComponentCase

    try:
        cases = [ComponentCase.installed(name) for name in names]
        for case in cases:
            case.component()
            case.believe = config.getoption("believe")
    except PrefixloomError as error:
        raise pytest.UsageError(" ".join(str(error).split())) from error
    config.stash[CASES] = cases
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(SUITE)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if Path(str(metafunc.module.__file__)) == SUITE:
        cases: list[ComponentCase] = metafunc.config.stash.get(CASES, [])
        names, pairs, ids = _pairs(cases)
        metafunc.parametrize(names, pairs, ids=ids)
