"""The conformance suite on the stores of this plugin."""

from prefixloom.testing.laws.storage import parametrize_with_checks
from tests.support.hicache_cases import FILE, MEMORY
from tests.support.server_cases import AZURE, MOONCAKE, REDIS, S3


@parametrize_with_checks([MEMORY, FILE, REDIS, S3, AZURE, MOONCAKE])
def test_conformance(case, check):  # type: ignore[no-untyped-def]
    check(case)
