"""The conformance kit on keys and values, on latents, and on a draft model's entries."""

import pytest

from prefixloom.testing import ComponentCase, parametrize_with_laws

heads = ComponentCase.installed("full", layers=(0, 2), shared={3: 2}, kv_heads=1, k_dim=2, v_dim=3)
latents = ComponentCase.installed("full", latent_dim=4, rope_dim=2)
draft = ComponentCase.installed("full", kv_heads=1, k_dim=2, lookahead=1)


@parametrize_with_laws(heads)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.slow
@parametrize_with_laws(latents, draft)
def test_conformance_of_the_others(case, law):  # type: ignore[no-untyped-def]
    law(case)
