"""Lines: files of one JSON object a line, read without holding them, and errors that name the line."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import attrs

from ...errors import InputError

Line = dict[str, Any]


@attrs.define
class ReadSoFar:
    """How far a file is read: bytes on disk."""

    read: int = 0
    size: int = 0

    @property
    def part(self) -> float:
        return min(1.0, self.read / self.size) if self.size else 0.0


LATEST = 1e15
"""Times lie below."""


class Where:
    """A line of a file, which says what is wrong with it."""

    __slots__ = ("line", "number", "path")

    def __init__(self, path: Path, number: int, line: Line) -> None:
        self.path, self.number, self.line = path, number, line

    def error(self, text: str) -> InputError:
        return InputError(f"{self.path}, line {self.number}: {text}")

    def whole(self, key: str, most: int, default: int | None = None) -> int:
        """Return a whole number from 0 up."""
        value = self.line.get(key, default)
        if value.__class__ is float and value.is_integer():
            value = int(value)
        if value.__class__ is not int or not 0 <= value <= most:
            raise self.error(f"{key!r} is expected to be a whole number from 0 to {most}, got {shown(value)}")
        return int(value)

    def seconds(self, key: str, ticks: float, default: float | None = None) -> float:
        value = self.line.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LATEST:
            raise self.error(f"{key!r} is expected to be a time from 0 up, got {shown(value)}")
        return value / ticks

    def text(self, *keys: str) -> str:
        for key in keys:
            if key in self.line:
                value = self.line[key]
                if isinstance(value, bool) or not isinstance(value, (str, int)):
                    raise self.error(f"{key!r} is expected to be a text or a whole number, got {shown(value)}")
                return str(value)
        return ""

    def many(self, key: str) -> list[Any]:
        value = self.line.get(key)
        if not isinstance(value, list):
            raise self.error(f"{key!r} is expected to be a list, got {shown(value)}")
        return value


class _Counted(io.RawIOBase):
    """A file that counts what is read of it."""

    def __init__(self, path: Path, progress: ReadSoFar) -> None:
        self._file = path.open("rb", buffering=0)
        self._progress = progress
        progress.read, progress.size = 0, path.stat().st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._progress.read += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def opened(path: Path, progress: ReadSoFar) -> IO[bytes]:
    """Return a file's content, decompressed where its name says so."""
    try:
        counted = io.BufferedReader(_Counted(path, progress), 1 << 16)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    return gzip.GzipFile(fileobj=counted) if path.suffix == ".gz" else counted  # type: ignore[return-value]


def numbered_texts(path: Path, progress: ReadSoFar, may_be_cut: bool = False) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (number, text, whether it is the last) of each line that is not empty, up to where the file is cut off."""
    number = 0
    with opened(path, progress) as file:
        lines = iter(file)
        held: tuple[int, bytes] | None = None
        while True:
            try:
                raw = next(lines, None)
            except (OSError, EOFError, zlib.error) as error:
                if may_be_cut and isinstance(error, EOFError) and number:
                    break
                raise InputError(f"{path}, after line {number}: it is cut off or no gzip file ({error})") from error
            if raw is None:
                break
            number += 1
            if raw.isspace():
                continue
            if held is not None:
                yield (*held, False)
            held = number, raw
        if held is not None:
            yield (*held, True)


def numbered_lines(path: Path, progress: ReadSoFar) -> Iterator[tuple[int, Line]]:
    """Yield (number, object) of each line that is not empty."""
    for number, raw, _ in numbered_texts(path, progress):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            cut = "" if raw.endswith(b"\n") else ", and the file ends in this line: it may be cut off"
            raise InputError(
                f"{path}, line {number}: a JSON object is expected, got {shown(raw[:60])} ({error}){cut}"
            ) from error
        if not isinstance(line, dict):
            raise InputError(f"{path}, line {number}: a JSON object is expected, got {shown(line)}")
        yield number, line


def shown(value: object) -> str:
    """Return a value in an error, cut off."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
