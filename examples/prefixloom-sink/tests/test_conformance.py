"""The conformance kit on sinks and a window; ``prefixloom_truth`` says what the layers read, without the reach."""

from prefixloom.testing import ComponentCase, parametrize_with_laws

case = ComponentCase.installed("sink", sinks=3, window=6, layers=2, head_dim=4)


@parametrize_with_laws(case)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)
