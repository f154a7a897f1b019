"""The conformance suite on the stores of this plugin."""

import pytest

from prefixloom.testing.laws.storage import parametrize_with_checks
from tests.support.hicache_cases import FILE, MEMORY
from tests.support.server_cases import AZURE, MOONCAKE, REDIS, S3


@parametrize_with_checks([MEMORY, FILE, S3])
def test_conformance(case, check):  # type: ignore[no-untyped-def]
    check(case)


@pytest.mark.outside("redis-server")
@parametrize_with_checks([REDIS])
def test_conformance_of_redis(case, check):  # type: ignore[no-untyped-def]
    check(case)


@pytest.mark.outside("azurite-blob")
@parametrize_with_checks([AZURE])
def test_conformance_of_azure(case, check):  # type: ignore[no-untyped-def]
    check(case)


@pytest.mark.outside("mooncake_master", "mooncake_client")
@parametrize_with_checks([MOONCAKE])
def test_conformance_of_mooncake(case, check):  # type: ignore[no-untyped-def]
    check(case)
