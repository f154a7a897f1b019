"""Twenty thousand damaged inputs for the readers; a million with ``python -m prefixloom_hicache.fuzz``."""

from __future__ import annotations

import attrs
import pytest

from prefixloom.storage import checksum
from prefixloom_hicache import frame, fuzz


def test_no_input_breaks_a_reader_or_is_taken_for_what_it_is_not() -> None:
    ended = fuzz.fuzz(20_000)
    assert sum(ended.values()) == 20_000
    for what in ("try_frame: read", "try_frame: corrupt", "try_frame: format", "try_segment: index of 5"):
        assert ended[what] > 20, f"hardly any input ended as {what!r}: {ended}"


def test_the_fuzz_sees_a_reader_that_trusts_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum.Checksum, "fits", lambda self, content: True)
    with pytest.raises(AssertionError, match="a payload that nobody wrote"):
        fuzz.fuzz(2000)


def test_the_fuzz_sees_a_scan_that_leaves_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Anywhere(int):
        """A size that no bound refuses."""

        def __rsub__(self, other: int) -> int:
            return other

    def trusting(data: bytes, place: frame.Place) -> frame.Header | frame.Flaw:
        header = frame.read_header(data, place)
        return header if isinstance(header, frame.Flaw) else attrs.evolve(header, size=Anywhere(header.size))

    monkeypatch.setattr("prefixloom_hicache.scan.read_header", trusting)
    with pytest.raises(AssertionError, match="out of bounds"):
        fuzz.fuzz(20_000)


def test_the_fuzz_sees_a_reader_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "_name", lambda padded: padded.rstrip(b"\0").decode())
    with pytest.raises(AssertionError, match=r"input \d+ broke try_\w+: (UnicodeDecode|Value)Error"):
        fuzz.fuzz(20_000)
