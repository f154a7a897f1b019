"""The conformance kit on keys and values, on latents, and on a draft model's entries."""

import pytest

from prefixloom.testing import ComponentCase, Truth, parametrize_with_laws
from prefixloom_full import FullComponent

HEADS = Truth(reads=range, ahead=0, grid=1, buffers=("k", "v"), layers=(0, 2), tokens_per_entry=1)
heads = ComponentCase(lambda: FullComponent(layers=(0, 2), shared={3: 2}, kv_heads=1, k_dim=2, v_dim=3), HEADS, "heads")
latents = ComponentCase(lambda: FullComponent(latent_dim=4, rope_dim=2), Truth(reads=range), "latents")
draft = ComponentCase(lambda: FullComponent(kv_heads=1, k_dim=2, lookahead=1), Truth(reads=range, ahead=1), "draft")


@parametrize_with_laws(heads)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.slow
@parametrize_with_laws(latents, draft)
def test_conformance_of_the_others(case, law):  # type: ignore[no-untyped-def]
    law(case)
