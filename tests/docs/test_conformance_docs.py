"""docs/conformance.md is generated from the laws and the broken components, and every clause has a law or a reason."""

from __future__ import annotations

from prefixloom.testing import LAWS
from prefixloom.testing.conformance import clauses, name_of
from tests.support.conformance_tables import ADMISSIONS, MARK, PAGE, POLICIES, ROOT, UNPROVED, generated, known_clauses


def test_the_page_has_the_tables_as_they_are_generated() -> None:
    assert PAGE.read_text().partition(MARK)[2] == "\n" + generated(), "python -m tests.support.conformance_tables"


def test_every_clause_has_a_law_or_a_reason_why_it_has_none() -> None:
    cited = {clause for law in (*LAWS, *POLICIES, *ADMISSIONS) for clause in clauses(law)}
    assert [clause for clause in known_clauses() if clause not in cited and clause not in UNPROVED] == []
    assert cited & set(UNPROVED) == set()
    assert set(UNPROVED) <= set(known_clauses())


def test_the_tests_that_the_reasons_name_exist() -> None:
    named = {word for reason in UNPROVED.values() for word in reason.replace(",", " ").replace(";", " ").split()}
    files = {word for word in named if word.startswith("tests/")}
    assert len(files) > 5
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_a_page_that_lacks_a_law_would_be_seen() -> None:
    assert all(f"`{name_of(law)}`" in PAGE.read_text() for law in LAWS)
