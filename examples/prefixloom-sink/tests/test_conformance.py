"""The conformance kit on sinks and a window; what the layers read is said here once more, without the reach."""

from prefixloom.testing import ComponentCase, Truth, parametrize_with_laws
from prefixloom_sink import SinkComponent

READS = Truth(reads=lambda q: {*range(min(q, 3)), *range(max(0, q - 5), q)}, ahead=0, buffers=("k", "v"), layers=(0, 1))
case = ComponentCase(lambda: SinkComponent(sinks=3, window=6, layers=2, head_dim=4), READS, "sink")


@parametrize_with_laws(case)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)
