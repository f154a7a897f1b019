"""The conformance suite on the stores of this plugin."""

import pytest

from prefixloom.testing import parametrize_with_laws
from tests.support.hicache_cases import FILE, MEMORY
from tests.support.server_cases import AZURE, MOONCAKE, REDIS, S3


@parametrize_with_laws(MEMORY, FILE, S3)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.outside("redis-server")
@parametrize_with_laws(REDIS)
def test_conformance_of_redis(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.outside("azurite-blob")
@parametrize_with_laws(AZURE)
def test_conformance_of_azure(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.outside("mooncake_master", "mooncake_client")
@parametrize_with_laws(MOONCAKE)
def test_conformance_of_mooncake(case, law):  # type: ignore[no-untyped-def]
    law(case)
