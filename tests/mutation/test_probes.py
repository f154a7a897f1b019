"""Probes say which lines ran, and change nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the tool needs the qualified names of code objects", allow_module_level=True)

from tests.mutation import probes as of
from tests.mutation.coverage_map import imported_by

SOURCE = '''
def asked(items, limit):
    """Says it."""
    total = 0
    for item in items:
        if item > limit:
            return total
        total += item
    else:
        total += 100
    try:
        total //= limit
    except ZeroDivisionError:
        total = -1

    def doubled():
        return 2 * total
    return doubled()
'''


class _Shop:
    """As much of a workshop as finds functions."""

    def __init__(self, function: object) -> None:
        self._function = function

    def has_imported(self, file: str) -> bool:
        return True

    def functions(self, file: str, name: str, line: int) -> list[object]:
        code = self._function.__code__  # type: ignore[attr-defined]
        return [self._function] if (code.co_qualname, code.co_firstlineno) == (name, line) else []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    """The function of ``SOURCE`` with probes, and a function that says which of its lines ran."""
    there: dict = {}
    exec(compile(SOURCE, "asked.py", "exec"), there)
    monkeypatch.setattr(of, "product_files", lambda: ["asked.py"])
    monkeypatch.setattr(of, "parsed", lambda file: ast.parse(SOURCE))
    probes = of.Probes(_Shop(there["asked"]))  # type: ignore[arg-type]
    monkeypatch.setattr("builtins." + of.NAME, None, raising=False)  # undone at the end
    probes.put_in()
    return there["asked"], lambda: sorted(line for probe in probes.taken() for line in probes.places[probe][1])


def text_of(lines: list[int]) -> list[str]:
    return [SOURCE.splitlines()[line - 1].strip() for line in lines]


def test_probes_tell_the_lines_that_ran(asked) -> None:
    function, ran = asked
    assert function([5], 3) == 0
    assert text_of(ran()) == ["total = 0", "for item in items:", "if item > limit:", "return total", "else:"]
    assert function([1, 2], 0) == 0
    assert "total += item" not in text_of(ran())
    assert function([], 0) == -2
    told = text_of(ran())
    assert "total = -1" in told and "return 2 * total" in told and "total += 100" in told
    assert "if item > limit:" not in told and "total += item" not in told
    assert ran() == []


def test_a_function_with_probes_keeps_its_text_and_its_lines(asked) -> None:
    function, _ = asked
    assert function.__doc__ == "Says it." and function.__code__.co_firstlineno == 2
    with pytest.raises(TypeError) as error:
        function([None], 3)
    assert error.traceback[-1].lineno + 1 == 6


def test_a_map_depends_on_what_the_test_file_imports() -> None:
    found = imported_by("tests/mutation/test_probes.py")
    assert {"conftest.py", "tests/mutation/probes.py", "tests/mutation/sites.py", "tests/support/places.py"} <= found
    assert not any(file.startswith("core") for file in found)
    assert imported_by(str(Path(__file__).with_name("no_such_file.py"))) == imported_by("conftest.py")
