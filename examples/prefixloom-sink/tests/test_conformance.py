"""The conformance kit on sinks and a window; ``prefixloom_truth`` says what the layers read, without the reach."""

from prefixloom.testing import ComponentCase, parametrize_with_laws
from prefixloom_sink import SinkComponent, prefixloom_truth

options = {"sinks": 3, "window": 6, "layers": 2, "kv_heads": 1, "head_dim": 4, "dtype": "bfloat16"}
case = ComponentCase(lambda: SinkComponent(**options), prefixloom_truth(options), "sink")


@parametrize_with_laws(case)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)
