"""What a distribution says of its layers fits the component that the same options make, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom.testing import ComponentCase
from prefixloom.testing.laws.facts import (
    law_the_manifest_has_all_that_the_layers_write,
    law_the_manifest_says_what_content_depends_on,
)

HEADS: dict[str, Any] = {"kv_heads": 2, "k_dim": 3}
MORE: dict[str, Any] = {**HEADS, "v_dim": 5, "layers": (1, 4), "shared": {6: 4}, "dtype": "float32", "lookahead": 1}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "full": (HEADS, MORE, {"latent_dim": 4}, {"latent_dim": 4, "rope_dim": 2, "layers": 2}, {"index_dim": 3}),
    "swa": ({**HEADS, "window": 5}, {**MORE, "window": 5}, {**MORE, "chunk": 8}),
    "mamba": (
        {"conv": (3, 2)},
        {"recurrent": (2, 2), "state_dtype": "bfloat16", "layers": (1, 3), "grid": 4},
        {"conv": (3, 2), "recurrent": (2, 2), "dtype": "float16", "layers": 2, "stored_as": "int8"},
    ),
}


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, some in OPTIONS.items() for each in some])
def test_the_truth_of_a_distribution_is_that_of_its_component(name: str, options: dict[str, Any]) -> None:
    case = ComponentCase.installed(name, **options)
    law_the_manifest_has_all_that_the_layers_write(case)
    law_the_manifest_says_what_content_depends_on(case)
