"""Tokens as bytes, and the extra keys of those whose content depends on more than the token.

A token is a whole number of ``TOKEN_BYTES`` bytes, little-endian, from 0 up to ``TOKEN_LIMIT``. Numbers below 0 stand
for extra keys (``elements``). Tokens are encoded once, when they enter the cache, because CPython compares bytes fast.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from operator import index, itemgetter
from typing import Any

from ..errors import InputError

TOKEN_BYTES = 4
CODE = {4: "i", 8: "q"}[TOKEN_BYTES]
"""What ``array`` calls a whole number of so many bytes."""
TOKEN_LIMIT = 1 << 8 * TOKEN_BYTES - 1

ExtraKey = str | bytes | int | bool | float | None | tuple[Any, ...]
Span = tuple[int, int, ExtraKey]
"""The positions [start, end) whose content depends on an extra key as well, and that key."""


class Tokens(bytes):
    """Encoded and checked tokens, as a bytes object that is fast to compare.

    ``extra`` are the spans of the tokens that have an extra key: in order, and no two of them overlap. A span that
    begins below 0 began before the first of these tokens (``piece``).
    """

    __slots__ = ()
    extra: tuple[Span, ...] = ()

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self) // TOKEN_BYTES

    def tolist(self) -> list[int]:
        return list(struct.unpack(f"<{len(self) // TOKEN_BYTES}{CODE}", self))

    def part(self, start: int, stop: int | None = None) -> Tokens:
        """Return the tokens [start, stop) as a prompt of their own: a span that began before begins with them."""
        taken = self.piece(start, stop)
        return taken if not taken.extra else with_spans(taken, clipped(taken.extra, 0, taken.count))

    def piece(self, start: int, stop: int | None = None) -> Tokens:
        """Return the tokens [start, stop) as a piece of their prompt, whose spans begin where they began there."""
        taken = Tokens(self[start * TOKEN_BYTES : None if stop is None else stop * TOKEN_BYTES])
        if not self.extra or not taken:
            return taken
        first = range(self.count)[start]
        return with_spans(taken, within(self.extra, first, first + taken.count))

    def keyed(self, extra: Iterable[Span]) -> Tokens:
        """Return these tokens with the extra keys of ``extra`` as well. A span that they have already counts once."""
        spans = self.extra
        given = spans_in(extra, self.count)
        if spans:
            known = {(start, end, exact_key(key)) for start, end, key in spans}
            given = tuple(span for span in given if (*span[:2], exact_key(span[2])) not in known)
        spans = tuple(sorted((*spans, *given), key=itemgetter(0)))
        for before, span in pairwise(spans):
            if before[1] > span[0]:
                told = f"the extra keys of [{before[0]}, {before[1]}) and [{span[0]}, {span[1]}) overlap"
                raise InputError(f"{told}: give one span for both, with a tuple of both keys")
        return with_spans(self, spans)

    def extended(self, more: Any) -> Tokens:
        """Return these tokens followed by ``more``, for example by the prompt of a conversation's next turn."""
        more = encode(more)
        return with_spans(Tokens(self + more), (*self.extra, *moved(clipped(more.extra, 0, more.count), self.count)))

    # ------------------------------------------------------------ identity
    def identity(self, start: int, stop: int) -> bytes:
        """Return bytes that tell the tokens [start, stop) from all others of this number, by their extra keys too."""
        taken = self[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        if not self.extra:
            return taken
        said = [(low, high, first, exact_key(key)) for low, high, first, key in self.extra_in(start, stop)]
        return taken + repr(said).encode() if said else taken

    def extra_in(self, start: int, stop: int) -> tuple[tuple[int, int, bool, ExtraKey], ...]:
        """Return the extra keys of [start, stop): (from where, up to where, whether the span begins there, key)."""
        return tuple((max(low, 0), high, low >= 0, key) for low, high, key in within(self.extra, start, stop))

    def begins_with(self, other: Tokens) -> bool:
        """Return whether ``other`` are the first of these tokens, with the same extra keys."""
        if not self.startswith(other):
            return False
        return not (self.extra or other.extra) or self.identity(0, other.count) == other.identity(0, other.count)

    def common(self, other: Tokens) -> int:
        """Return how many of the first tokens of both are the same, with the same extra keys."""
        low, high = 0, min(self.count, other.count)
        middle = high  # for nearly all changes that are followed, all of them are
        while low < high:
            if self.identity(low, middle) == other.identity(low, middle):
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low


class KeyedTokens(Tokens):
    """Tokens of which some have an extra key."""

    extra: tuple[Span, ...]


def with_spans(tokens: Tokens, spans: tuple[Span, ...]) -> Tokens:
    """Return ``tokens`` with these extra keys instead of those that they have."""
    if not spans:
        return tokens if not tokens.extra else Tokens(tokens)
    keyed = KeyedTokens(tokens)
    keyed.extra = spans
    return keyed


def within(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """Return the spans that have a position in [start, stop), counted from there, and cut off at its end."""
    first, last = bisect_right(spans, start, key=itemgetter(1)), bisect_right(spans, stop - 1, key=itemgetter(0))
    return tuple((low - start, min(high, stop) - start, key) for low, high, key in spans[first:last])


def clipped(spans: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """Return what of ``spans`` lies in [start, end)."""
    cut = ((max(low, start), min(high, end), key) for low, high, key in spans)
    return tuple(span for span in cut if span[0] < span[1])


def moved(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Return ``spans``, ``by`` positions later."""
    return tuple((low + by, high + by, key) for low, high, key in spans)


def spans_in(extra: object, count: int) -> tuple[Span, ...]:
    """Check the (start, end, key) spans of extra keys over ``count`` tokens."""
    try:
        spans = tuple((index(start), index(end), key) for start, end, key in extra)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise InputError(f"extra takes (start, end, key) spans of token positions: {error}") from None
    for start, end, key in spans:
        if not 0 <= start < end <= count:
            raise InputError(f"extra key span [{start}, {end}) lies outside of the {count} tokens")
        exact_key(key)
    return spans


def exact_key(key: ExtraKey) -> str:
    """Return an extra key as text that means the same in every process. 1, True and 1.0 are three keys."""
    if type(key) is int:
        return hex(key)  # Python refuses decimal digits of very large numbers
    if type(key) is tuple:
        return f"({','.join(map(exact_key, key))})"
    if key is None or type(key) in (str, bytes, bool, float):
        return ascii(key)
    raise InputError(f"an extra key is text, bytes, a number, None or a tuple of such, got {type(key).__name__}")


def encode(tokens: Any) -> Tokens:
    """Encode tokens from a list, tuple, range, array, numpy or CPU torch array, or from encoded bytes."""
    kind = type(tokens)
    if kind is Tokens or kind is KeyedTokens:
        return tokens  # type: ignore[no-any-return]
    if kind is list or kind is tuple:
        return Tokens(_pack(tokens))
    if isinstance(tokens, (bytes, bytearray, memoryview)) and memoryview(tokens).format in ("B", "b", "c"):
        if len(tokens) % TOKEN_BYTES:
            raise InputError(f"encoded tokens must be whole int{8 * TOKEN_BYTES} values; got {len(tokens)} bytes")
        return Tokens(_in_range(bytes(tokens)))
    if isinstance(tokens, str):
        raise InputError("tokens must be whole numbers, not text: run the tokenizer first")
    if hasattr(tokens, "detach"):
        return Tokens(_pack(_from_torch(tokens)))
    try:
        view = memoryview(tokens)
    except (TypeError, ValueError):
        if not isinstance(tokens, Iterable) or isinstance(tokens, (Set, Mapping)):
            hint = f": write [{tokens}]" if kind is int else ""
            raise InputError(f"tokens must be a sequence of whole numbers, got {kind.__name__}{hint}") from None
        return Tokens(_pack(list(tokens)))
    return Tokens(_from_buffer(view))


def _pack(tokens: Sequence[Any]) -> bytes:
    try:
        packed = struct.pack(f"<{len(tokens)}{CODE.upper()}", *tokens)
    except struct.error:
        raise _bad_token(tokens) from None
    return _in_range(packed, tokens)


def _in_range(packed: bytes, tokens: Iterable[Any] | None = None) -> bytes:
    if has_negative(packed):
        raise _bad_token(array(CODE, packed) if tokens is None else tokens)
    return packed


def has_negative(packed: bytes | bytearray) -> bool:
    """Return whether one of these numbers is below 0. A top byte is ASCII exactly if its number has no sign."""
    return not packed[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()


def _bad_token(tokens: Iterable[Any]) -> InputError:
    for i, token in enumerate(tokens):
        if not hasattr(token, "__index__"):
            return InputError(f"token {i} is {token!r} ({type(token).__name__}); tokens must be whole numbers")
        if not 0 <= token < TOKEN_LIMIT:
            return InputError(f"token {i} is {int(token)}; tokens must lie between 0 and {TOKEN_LIMIT - 1}")
    return InputError("tokens must be whole numbers")


def _from_torch(tensor: Any) -> list[int]:
    if tensor.device.type != "cpu":
        raise InputError(f"tokens lie on {tensor.device}: reading them would make the scheduler wait; pass a CPU copy")
    if tensor.dim() != 1 or not str(tensor.dtype).startswith(("torch.int", "torch.uint")):
        raise InputError(f"tokens must be a one-dimensional integer tensor, got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor.tolist()  # type: ignore[no-any-return]


def _from_buffer(view: memoryview) -> bytes:
    if view.ndim != 1 or view.format.lstrip("<=@") not in tuple("bBhHiIlLqQ"):
        raise InputError(f"tokens must be a one-dimensional integer array, got format {view.format!r}, {view.ndim}-d")
    if view.itemsize == TOKEN_BYTES:
        return _in_range(view.tobytes(), view)
    if view.itemsize == 2 * TOKEN_BYTES:  # as most engines have them: both halves at once, without a list
        halves = array(CODE, view.tobytes())
        high = halves[1::2].tobytes()
        if high.count(0) != len(high):
            raise _bad_token(view.tolist())
        return _in_range(halves[0::2].tobytes(), view)
    return _pack(view.tolist())


def namespace_of(given: object) -> str:
    """Return a namespace as a plain string, or raise ``InputError``."""
    if not isinstance(given, str):
        raise InputError(f"a namespace must be a string, got {given!r}")
    return str(given)
