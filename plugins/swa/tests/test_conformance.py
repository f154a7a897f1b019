"""The conformance kit on windows, of which the tree keeps all or the last, and on chunks."""

import pytest

from prefixloom.testing import ComponentCase, Truth, parametrize_with_laws
from prefixloom_swa import SwaComponent

WINDOW = Truth(reads=lambda q: range(max(0, q - 5), q), ahead=0, grid=1, buffers=("k", "v"), tokens_per_entry=1)
window = ComponentCase(lambda: SwaComponent(window=6, kv_heads=1, k_dim=2), WINDOW, "window")
last = ComponentCase(lambda: SwaComponent(window=6, kv_heads=1, k_dim=2, keep_windows="last"), WINDOW, "last")
CHUNK = Truth(reads=lambda q: range(q // 12 * 12, q))
chunk = ComponentCase(lambda: SwaComponent(chunk=12, kv_heads=1, k_dim=2), CHUNK, "chunk")


@parametrize_with_laws(window)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.slow
@parametrize_with_laws(last, chunk)
def test_conformance_of_the_others(case, law):  # type: ignore[no-untyped-def]
    law(case)
