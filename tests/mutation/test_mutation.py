"""The mutation tool: sites are named by structure, every mutant is another function, and tests kill what they must."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import sites as of
from tests.mutation.by_hand import BY_HAND
from tests.mutation.fragments import Fragment, changed
from tests.support.killing import fragment_of
from tests.support.mutants import MUTANTS
from tests.support.mutants_tiers import MUTANTS_OF_TIERS
from tests.support.places import ROOT, file_of_test

SOURCE = '''
LIMIT = 3

class Box:
    def fits(self, size, items=(), *, most=LIMIT + 1):
        """Whether it fits."""
        if size < most and not items:
            return True
        for item in items[1:]:
            size += item
            if item == 0:
                break
        return max(size, 0) <= most
'''
MOVED = '''
import os
LIMIT = 3


class Box:
    def other(self): return 1 + 1

    # a comment
    def fits(
        self, size, items=(), *, most=LIMIT + 1
    ):
        """Says whether it does fit."""
        if (size < most) and not items:  # so
            return True
        for item in items[1:]:
            size += item
            if item == 0: break
        return max(size, 0) <= most
'''


def names(source: str, function: str) -> list[str]:
    return [found.site.name for found in of.found_in("box.py", ast.parse(source)) if found.site.function == function]


def test_a_site_keeps_its_name_when_its_function_moves_or_is_formatted() -> None:
    assert names(SOURCE, "Box.fits") == names(MOVED, "Box.fits") != []


def test_a_site_has_another_name_when_its_function_changes() -> None:
    assert not set(names(SOURCE, "Box.fits")) & set(names(SOURCE.replace("size += item", "size -= item"), "Box.fits"))


def test_what_stands_outside_of_functions_has_no_site() -> None:
    assert {found.site.function for found in of.found_in("box.py", ast.parse(SOURCE))} == {"Box.fits"}
    operators = [found.site.operator for found in of.found_in("box.py", ast.parse(SOURCE))]
    assert "off_by_one" not in operators and operators.count("arithmetic") == 1  # of ``size += item``, not of a default


def test_what_only_asserts_or_tells_people_something_has_no_site() -> None:
    silent = """
def f(a, b):
    assert len(a) < 3
    log.warning("%s and %s", a, b)
    require(a < b, "%s is not below", a - 1)
    return [*zip(a, b, strict=True)], add("--a", metavar="A" * 2)
"""
    plain = silent
    for each in (", strict=True", ', metavar="A" * 2', ', "%s is not below", a - 1'):
        plain = plain.replace(each, "")
    told = [name.rpartition(" ")[0] for name in names(silent, "f")]
    assert told == [name.rpartition(" ")[0] for name in names(plain, "f")] != []
    assert [name for name in told if "call_dropped" in name] == ["box.py::f call_dropped 0"]  # the check itself


def test_every_operator_that_fits_makes_its_change() -> None:
    made = {}
    for number, _ in enumerate(names(SOURCE, "Box.fits")):
        found = list(of.found_in("box.py", tree := ast.parse(SOURCE)))[number]
        found.place.put(found.change())
        (unit,) = of.units(tree)
        made.setdefault(found.site.operator, []).append(ast.unparse(ast.fix_missing_locations(unit.node)))
    old = ast.unparse(next(of.units(ast.parse(SOURCE))).node)
    assert all(text != old for texts in made.values() for text in texts)
    assert "if size <= most and" in made["comparison_edge"][0]
    assert "if size < most or not items" in made["and_or"][0]
    assert "if not items:" in made["operand_dropped"][0] and "if size < most:" in made["operand_dropped"][1]
    assert "size -= item" in made["arithmetic"][0]
    assert "items[1 + 1:]" in made["slice_edge_moved"][0] and "items[:]" in made["slice_edge_dropped"][0]
    assert "min(size, 0)" in made["min_max_any_all"][0]
    assert "continue" in made["loop_exit"][0] and "break" not in made["loop_exit_dropped"][0]
    assert "return None" in made["return_changed"][0] and "return False" in made["constant_flipped"][0]


@pytest.mark.parametrize("file", [file for number, file in enumerate(of.product_files()) if number % 9 == 0])
def test_every_mutant_of_a_file_can_be_compiled(file: str) -> None:
    for site in of.sites(file)[::17]:
        compile(of.mutate(site), file, "exec")


def test_a_fragment_is_found_by_its_structure_and_a_stale_one_is_told() -> None:
    file = "core/prefixloom/tree/cells.py"
    found = Fragment("one", file, "Cells.put_back", "cell . node.parent.cells[self.index].below  +=  (1)", "")
    tree, _ = changed(found)
    (unit,) = [unit for unit in of.units(tree) if unit.name == "Cells.put_back"]
    assert ast.unparse(unit.node.body[1:]) == "if self.closed_upward:\n    pass\nself.enter(cell)"
    with pytest.raises(LookupError, match=r"has no 'cell\.above"):
        changed(found._replace(old="cell.above += 1"))
    with pytest.raises(LookupError, match=r"has no Cells\.put_forward"):
        changed(found._replace(function="Cells.put_forward"))


def test_every_mistake_that_is_made_by_hand_can_still_be_made() -> None:
    stale = []
    for each in (*BY_HAND, *map(fragment_of, (*MUTANTS, *MUTANTS_OF_TIERS))):
        try:
            changed(each)
        except LookupError as error:
            stale.append(str(error))
    assert stale == []
    for mutant in (*MUTANTS, *MUTANTS_OF_TIERS):
        kind, files, _ = mutant.killer
        assert kind != "test" or all(file_of_test(each) for each in files.split()), mutant.name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the judgements are read with tomllib")
def test_judgements_name_operators_and_functions_that_there_are() -> None:
    """Not their digests: who changes a function need not judge at once. The tool says what is to be judged again."""
    from tests.mutation.score import equivalents

    assert equivalents()
    for name, why in equivalents().items():
        file, _, rest = name.partition("::")
        function, operator, _, _ = rest.split()
        assert any((site.function, site.operator) == (function, operator) for site in of.sites(file)), name
        assert len(why) > 20, name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the tool needs the qualified names of code objects")
def test_mutants_run_in_forks_against_the_tests_that_cover_them(tmp_path: Path) -> None:
    """Of ``common_prefix`` the test that is made here kills what makes its answers wrong, and nothing else."""
    test = tmp_path / "test_prefix.py"
    test.write_text(
        "from prefixloom_engine.serving.scheduler import common_prefix\n"
        "def test_it_counts(): assert common_prefix([1, 2, 3], [1, 2, 4], 9) == 2\n"
        "def test_it_is_bounded(): assert common_prefix([1, 2], [1, 2], 1) == 1\n"
    )
    call = [sys.executable, "-m", "tests.mutation", "--only", "engine/prefixloom_engine/serving/scheduler.py"]
    call += [
        "--function",
        "common_prefix",
        "--count",
        "40",
        "--patience",
        "0.1",
        "--json",
        str(tmp_path / "told"),
        str(test),
    ]
    environment = {**os.environ, "PREFIXLOOM_MUTATION_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {(each["operator"], each["ordinal"]): each for each in json.loads((tmp_path / "told").read_text())}
    assert told["comparison_negated", 0]["how"] == told["return_changed", 0]["how"] == "killed"
    assert told["comparison_negated", 0]["by"].endswith(("test_it_counts", "test_it_is_bounded"))
    assert told["comparison_edge", 0]["how"] == "timeout"  # low <= high searches on for ever
    assert "| engine |" in done.stdout
