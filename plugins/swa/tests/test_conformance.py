"""The conformance kit on windows, of which the tree keeps all or the last, and on chunks."""

import pytest

from prefixloom.testing import ComponentCase, parametrize_with_laws

window = ComponentCase.installed("swa", window=6, kv_heads=1, k_dim=2)
last = ComponentCase.installed("swa", window=6, kv_heads=1, k_dim=2, keep_windows="last")
chunk = ComponentCase.installed("swa", chunk=12, kv_heads=1, k_dim=2)


@parametrize_with_laws(window)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.slow
@parametrize_with_laws(last, chunk)
def test_conformance_of_the_others(case, law):  # type: ignore[no-untyped-def]
    law(case)
