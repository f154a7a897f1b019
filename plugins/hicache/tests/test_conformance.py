"""The conformance suite on the stores of this plugin."""

from prefixloom.testing.laws.storage import parametrize_with_checks
from tests.support.hicache_cases import FILE, MEMORY


@parametrize_with_checks([MEMORY, FILE])
def test_conformance(case, check):  # type: ignore[no-untyped-def]
    check(case)
