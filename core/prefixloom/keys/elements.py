"""What a tree compares: a sequence's tokens, with numbers in place of extra keys, and with the tokens that follow."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Set

from ..errors import InputError
from .tokens import (
    CODE,
    TOKEN_BYTES,
    TOKEN_LIMIT,
    ExtraKey,
    Span,
    Tokens,
    clipped,
    exact_key,
    has_negative,
    moved,
    with_spans,
    within,
)

UNKNOWN = -1
"""Stands in a key for an extra key that no number was given to: no node has it."""
FEW = 1024
"""Numbers of extra keys that are kept without asking whether they are in use."""


class KeyMaker:
    """Makes the key elements, which the tree compares, from a sequence's tokens.

    With a lookahead of k, an element is the token together with the k tokens that follow it, so that two prefixes share
    a page only if everything that its content depends on is equal; the last k tokens have no element yet.

    Extra keys replace the tokens at their positions by numbers, which are exact within this cache (# 0007). A number is
    given when a sequence is opened (``name``). A match only looks numbers up (``find``), so it leaves nothing behind. A
    number is forgotten when nothing uses it any more (``keep``), and never given twice: a key from before must not
    match data from after.
    """

    __slots__ = ("_kept", "_next", "_numbers", "element_bytes", "lookahead", "meant")

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.element_bytes = TOKEN_BYTES * (lookahead + 1)
        self.meant: dict[int, tuple[ExtraKey, int, bool]] = {}
        """By number: the extra key, the token that it replaces, and whether its span begins there."""
        self._numbers: dict[tuple[str, int, bool], int] = {}
        self._next = -TOKEN_LIMIT
        self._kept = 0

    def find(self, tokens: Tokens) -> bytes:
        """Return the elements of ``tokens``, with the numbers of the extra keys that have one."""
        return self._widen(self._replaced(tokens, False) if tokens.extra else tokens)

    def name(self, tokens: Tokens) -> bytes:
        """Return the elements of ``tokens``. An extra key that has no number yet is given one."""
        return self._widen(self._replaced(tokens, True) if tokens.extra else tokens)

    def _replaced(self, tokens: Tokens, give: bool) -> bytes:
        out = array(CODE, tokens)
        for start, end, key in tokens.extra:
            text = exact_key(key)
            for i in range(max(start, 0), end):
                token, first = out[i], i == start
                number = self._numbers.get((text, token, first), UNKNOWN)
                out[i] = self._give(text, key, token, first) if give and number == UNKNOWN else number
        return out.tobytes()

    def _give(self, text: str, key: ExtraKey, token: int, first: bool) -> int:
        number = self._next
        if number == UNKNOWN:
            raise InputError("no number is left for another extra key: flush the cache, or make another one")
        self._next += 1
        self._numbers[text, token, first] = number
        self.meant[number] = key, token, first
        return number

    def _widen(self, tokens: bytes) -> bytes:
        k = self.lookahead
        if not k:
            return tokens
        single = array(CODE, tokens)
        count = len(single) - k
        if count <= 0:
            return b""
        wide = array(CODE, bytes(count * self.element_bytes))
        for i in range(k + 1):
            wide[i :: k + 1] = single[i : i + count]
        return wide.tobytes()

    # ------------------------------------------------------------ which numbers are in use
    def crowded(self, nodes: int) -> bool:
        """Return whether there are so many numbers that it is worth a look at ``nodes`` nodes which are in use."""
        return len(self.meant) > max(FEW, 2 * self._kept, nodes)

    def keep(self, used: Set[int]) -> None:
        """Forget all numbers but those in ``used``."""
        self.meant = {number: self.meant[number] for number in used if number in self.meant}
        self._numbers = {(exact_key(key), token, first): n for n, (key, token, first) in self.meant.items()}
        self._kept = len(self.meant)

    def forget(self) -> None:
        """Forget all numbers. No tree may refer to them any more."""
        self.keep(frozenset())

    # ------------------------------------------------------------ reading keys
    def extra_in(self, key: bytes, start: int) -> tuple[Span, ...]:
        """Return the extra keys of the positions from ``start`` on whose elements are ``key``, cut off where it is."""
        if not self.meant or not has_negative(key):
            return ()
        numbers = array(CODE, key)[:: self.lookahead + 1]
        return moved(clipped(self._spans_of(numbers), 0, len(numbers)), start)

    def tokens_in(self, key: bytes) -> Tokens:
        """Return the tokens whose elements are ``key``: ``lookahead`` more than there are elements.

        The key of an edge gives a piece of a prompt (``Tokens.piece``).
        """
        k = self.lookahead
        if not k and not self.meant:
            return Tokens(key)
        wide = array(CODE, key)
        numbers = wide[:: k + 1] + wide[len(wide) - k :] if k else wide
        if not has_negative(key):
            return Tokens(numbers.tobytes())
        spans = self._spans_of(numbers)
        for at, number in enumerate(numbers):
            if number < 0:
                numbers[at] = self.meant[number][1]
        return with_spans(Tokens(numbers.tobytes()), spans)

    def _spans_of(self, numbers: Iterable[int]) -> tuple[Span, ...]:
        """Return the spans that ``numbers`` stand for. One that goes on from before the first begins at -1."""
        found: list[Span] = []
        for at, number in enumerate(numbers):
            if number < 0:
                key, _, first = self.meant[number]
                if first or not at:
                    found.append((at if first else -1, at + 1, key))
                else:
                    found[-1] = (found[-1][0], at + 1, key)
        return tuple(found)


def numbers_of(key: bytes | bytearray) -> array[int]:
    """Return the numbers that a key consists of: tokens, and below 0 those that stand for extra keys."""
    return array(CODE, bytes(key))


def extra_numbers(key: bytes | bytearray) -> Set[int]:
    """Return the numbers in ``key`` that stand for extra keys."""
    return {number for number in numbers_of(key) if number < 0} if has_negative(key) else frozenset()


class NamedTokens:
    """The known tokens of a growing sequence, and their key elements.

    ``count`` is the number of tokens, and ``extra`` are the spans of those that have an extra key. ``_elements`` are
    ``_tokens`` themselves while these are what a tree compares.
    """

    __slots__ = ("_elements", "_maker", "_tokens", "count", "extra")

    def __init__(self, maker: KeyMaker, tokens: Tokens, key: bytes) -> None:
        """Begin with ``tokens``, a prompt whose elements are ``key``."""
        self._maker = maker
        self._tokens = bytearray(tokens)
        self._elements = self._tokens if key is tokens else bytearray(key)
        self.count = len(tokens) // TOKEN_BYTES
        self.extra = tokens.extra

    @property
    def tokens(self) -> Tokens:
        """All tokens."""
        return with_spans(Tokens(self._tokens), self.extra)

    @property
    def extra_numbers(self) -> Set[int]:
        """The numbers of the extra keys among the tokens."""
        return extra_numbers(self._elements) if self.extra else frozenset()

    def append(self, tokens: Tokens) -> None:
        """Append ``tokens``, with their extra keys."""
        if tokens.extra or self._elements is not self._tokens:
            self._append_elements(tokens)  # first: there may be no number left
        self._tokens += tokens
        self.count += len(tokens) // TOKEN_BYTES

    def _append_elements(self, tokens: Tokens) -> None:
        """Append the elements of what has none yet: of the last tokens that look ahead, and of ``tokens``."""
        waiting = max(0, self.count - self._maker.lookahead)  # the first token that has no element yet
        extra = *self.extra, *moved(tokens.extra, self.count)
        tail = Tokens(self._tokens[waiting * TOKEN_BYTES :] + tokens)
        more = self._maker.name(with_spans(tail, within(extra, waiting, waiting + tail.count)))
        if self._elements is self._tokens:
            self._elements = bytearray(self._tokens)
        self._elements += more
        self.extra = extra

    def key_between(self, first: int, last: int) -> bytes:
        """Return the bytes of the key's elements [first, last)."""
        width = self._maker.element_bytes
        return bytes(memoryview(self._elements)[first * width : last * width])

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` tokens."""
        if self._elements is not self._tokens:
            del self._elements[max(0, count - self._maker.lookahead) * self._maker.element_bytes :]
        del self._tokens[count * TOKEN_BYTES :]
        self.count = count
        self.extra = clipped(self.extra, 0, count)
