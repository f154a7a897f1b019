"""The conformance suite on the stores of this plugin."""

from hicache_cases import FILE, MEMORY

from prefixloom.testing.storage import parametrize_with_checks


@parametrize_with_checks([MEMORY, FILE])
def test_conformance(case, check):  # type: ignore[no-untyped-def]
    check(case)
