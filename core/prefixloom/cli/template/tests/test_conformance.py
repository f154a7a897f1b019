"""The conformance kit on this component. What the layers do stands in ``prefixloom_truth`` of its module."""

from typing import Any

from prefixloom.testing import ComponentCase, parametrize_with_laws

case = ComponentCase.installed("ring")


@parametrize_with_laws(case)
def test_conformance(case: Any, law: Any) -> None:
    law(case)
