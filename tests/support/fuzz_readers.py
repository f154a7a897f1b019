"""A fuzz of the readers of records and fingerprints: bytes that nobody wrote, and bytes that were damaged.

    python -m tests.support.fuzz_readers --inputs 1000000 [--seed 0]

Every input must end in a record that was written, or in a reason. The inputs are drawn from a seed, so that a failure
can be repeated.
"""

from __future__ import annotations

import argparse
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator

from prefixloom.storage import (
    HEADER_BYTES,
    NUMBERS,
    Fingerprint,
    Flaw,
    decode_header,
    decode_record,
    encode_header,
)
from prefixloom.testing.laws.storage import ONE, key_of, record_of

Draw = random.Random
Mutation = Callable[[Draw, bytearray], None]


class Corpus:
    """Valid bytes to start from."""

    def __init__(self) -> None:
        records = [record_of(seed, size) for seed, size in enumerate((1, 40, 255, 256, 300))]
        self.records = {record.key.address: record for record in records}
        self.frames = [(record.key, encode_header(record) + bytes(record.payload)) for record in records]


# ---------------------------------------------------------------- ways to damage


def flip(draw: Draw, data: bytearray) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)


def cut(draw: Draw, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def longer(draw: Draw, data: bytearray) -> None:
    data += draw.randbytes(draw.choice((1, 255, 256, 1000)))


def noise(draw: Draw, data: bytearray) -> None:
    at = draw.randrange(len(data))
    size = min(len(data) - at, draw.choice((1, 8, 64, 512)))
    data[at : at + size] = draw.randbytes(size)


def extreme(draw: Draw, data: bytearray) -> None:
    """Write a smallest or largest number where a header may have a number."""
    at = draw.randrange(0, min(len(data), HEADER_BYTES), 4)
    data[at : at + 8] = draw.choice((b"\0" * 8, b"\xff" * 8, b"\0" * 7 + b"\x80", b"\xff" * 7 + b"\x7f"))


def moved(draw: Draw, data: bytearray) -> None:
    """Copy a part over another part, as when a file was written over and still has an old part."""
    size = min(len(data), draw.choice((8, HEADER_BYTES, 2 * HEADER_BYTES)))
    source, target = (draw.randrange(0, len(data) - size + 1, draw.choice((1, HEADER_BYTES))) for _ in range(2))
    data[target : target + size] = data[source : source + size]


def nothing(draw: Draw, data: bytearray) -> None:
    data[:] = draw.choice((b"", bytes(len(data)), draw.randbytes(len(data))))


def resealed(draw: Draw, data: bytearray) -> None:
    """Change a field of a header and correct its checksum, so that only the meaning can be wrong."""
    if len(data) < HEADER_BYTES:
        return
    at = draw.randrange(*draw.choice(((8, HEADER_BYTES), (16, 56))))  # anywhere, or in its numbers
    data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    if draw.random() < 0.2:
        data[10], data[11] = draw.randrange(3), draw.choice((*NUMBERS.values(), 0, 9))
    check = zlib.crc32(data[16:HEADER_BYTES], zlib.crc32(data[8:12]))
    data[12:16] = struct.pack("<I", check)


MUTATIONS: tuple[Mutation, ...] = (flip, flip, cut, longer, noise, extreme, moved, nothing, resealed, resealed)


# ---------------------------------------------------------------- what is tried


def try_frame(corpus: Corpus, draw: Draw) -> str:
    """The reader of one record: it returns what was written, or a reason."""
    key, frame = draw.choice(corpus.frames)
    data = bytearray(frame)
    _damage(draw, data)
    asked = key if draw.random() < 0.9 else key_of(draw.randrange(8))
    found = decode_record(data, asked)
    if isinstance(found, Flaw):
        return found.reason
    mine = corpus.records[asked.address]
    assert found.key == asked and found.payload == mine.payload, "a payload that nobody wrote"
    return "read"


def try_fingerprint(corpus: Corpus, draw: Draw) -> str:
    data = bytearray(ONE.text.encode())
    _damage(draw, data)
    found = Fingerprint.read(bytes(data))
    assert found is None or (found.digest and found.difference(ONE) is not None)
    return "unknown" if found is None else "a fingerprint"


def try_header(corpus: Corpus, draw: Draw) -> str:
    """The reader of a header, on random bytes: it returns a reason."""
    found = decode_header(draw.randbytes(draw.choice((0, 1, 255, 256, 300))))
    assert isinstance(found, Flaw)
    return found.reason


TRIALS = (try_frame, try_frame, try_frame, try_frame, try_frame, try_fingerprint, try_header)


def _damage(draw: Draw, data: bytearray) -> None:
    draw.choice(MUTATIONS if data else (longer,))(draw, data)


def fuzz(inputs: int, seed: int = 0) -> Counter[str]:
    """Try so many inputs and count how they ended. Raise at the first failure, with the number that repeats it."""
    corpus, ended = Corpus(), Counter[str]()
    for number in _numbers(seed, inputs):
        draw = random.Random(number)
        trial = draw.choice(TRIALS)
        try:
            ended[f"{trial.__name__}: {trial(corpus, draw)}"] += 1
        except Exception as error:
            raise AssertionError(f"input {number} broke {trial.__name__}: {error!r}") from error
    return ended


def _numbers(seed: int, inputs: int) -> Iterator[int]:
    return iter(range(seed * 1_000_000_000, seed * 1_000_000_000 + inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    begun = time.perf_counter()
    ended = fuzz(asked.inputs, asked.seed)
    for what, count in sorted(ended.items()):
        print(f"{count:9} {what}")
    print(
        f"{sum(ended.values())} inputs in {time.perf_counter() - begun:.0f} s: a record that was written, or a reason"
    )


if __name__ == "__main__":
    main()
