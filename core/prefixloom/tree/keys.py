"""Keys: tokens as bytes, and what a tree compares.

A token is a little-endian int32 from 0 to 2**31 - 1; negative numbers stand for extra keys (the hash of an image at its
placeholder, for example). Comparing bytes makes matching fast in CPython, so tokens are encoded once, when
they enter the cache. Nothing here knows a tree, a pool or a component.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from itertools import pairwise
from operator import index
from typing import Any

from ..errors import InputError

TOKEN_BYTES = 4

TOKEN_LIMIT = 1 << 31

Span = tuple[int, int, Hashable]
"""The positions [start, end) whose content depends on an extra key as well, and that key."""


class Tokens(bytes):
    """Encoded and checked tokens, as a bytes object that is fast to compare and to slice.

    ``extra`` are the (start, end, key) spans of those whose content depends on more than the token. A running
    sequence's tokens have them; whoever takes the tokens takes them as well.
    """

    __slots__ = ()
    extra: tuple[Span, ...] = ()

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self) // TOKEN_BYTES

    def tolist(self) -> list[int]:
        return list(struct.unpack(f"<{len(self) // TOKEN_BYTES}I", self))

    def part(self, start: int, stop: int | None = None) -> Tokens:
        """The tokens [start, stop)."""
        taken = Tokens(self[start * TOKEN_BYTES : None if stop is None else stop * TOKEN_BYTES])
        if not self.extra or not taken:
            return taken
        first = range(self.count)[start]
        return with_spans(taken, moved(clipped(self.extra, first, first + taken.count), -first))

    def keyed(self, extra: Iterable[Span]) -> Tokens:
        """These tokens with the extra keys of ``extra`` as well.

        The spans are then as in ``Change.tokens``: in the order of their beginnings, and of two that overlap the one
        first that was given first. What a cache takes for the same has the same spans, with the same ``exact_key``.
        """
        spans = spans_of(self, extra)
        ordered = sorted(spans, key=lambda span: span[0])
        if all(before[1] <= span[0] for before, span in pairwise(ordered)):
            return with_spans(self, tuple(ordered))
        maker = KeyMaker(0)
        return maker.tokens_in(maker.name_extra(self, spans))

    def extended(self, more: Any) -> Tokens:
        """These tokens followed by ``more``, for example the prompt of a conversation's next turn."""
        more = encode(more)
        return with_spans(Tokens(self + more), (*self.extra, *moved(more.extra, self.count)))


class KeyedTokens(Tokens):
    """Tokens of which some have an extra key."""

    extra: tuple[Span, ...]


def with_spans(tokens: Tokens, spans: tuple[Span, ...]) -> Tokens:
    """``tokens`` that have these extra keys."""
    if not spans:
        return tokens
    keyed = KeyedTokens(tokens)
    keyed.extra = spans
    return keyed


def clipped(spans: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """What of ``spans`` lies in [start, end)."""
    cut = ((max(low, start), min(high, end), key) for low, high, key in spans)
    return tuple(span for span in cut if span[0] < span[1])


def moved(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """``spans``, ``by`` positions later."""
    return tuple((low + by, high + by, key) for low, high, key in spans)


def encode(tokens: Any) -> Tokens:
    """Encode tokens from a list, tuple, range, array, numpy or CPU torch array, or from little-endian int32 bytes."""
    kind = type(tokens)
    if kind is Tokens or kind is KeyedTokens:
        return tokens  # type: ignore[no-any-return]
    if kind is list or kind is tuple:
        return Tokens(_pack(tokens))
    if isinstance(tokens, (bytes, bytearray, memoryview)) and memoryview(tokens).format in ("B", "b", "c"):
        if len(tokens) % TOKEN_BYTES:
            raise InputError(f"encoded tokens must be whole int32 values; got {len(tokens)} bytes")
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
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        raise _bad_token(tokens) from None
    return _in_range(packed, tokens)


def _in_range(packed: bytes, tokens: Iterable[Any] | None = None) -> bytes:
    # A fast check of the sign bit of every token: the top bytes must be ASCII.
    if not packed[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
        raise _bad_token(struct.unpack(f"<{len(packed) // TOKEN_BYTES}i", packed) if tokens is None else tokens)
    return packed


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
    if view.itemsize == 2 * TOKEN_BYTES:
        if len(view) >= MANY and view.contiguous and not view.readonly and view.format.endswith(("l", "q")):
            return _halved(view)
        words = memoryview(view.tobytes()).cast("i")
        low, high = words[0::2].tobytes(), words[1::2].tobytes()
        if high.count(0) != len(high):
            raise _bad_token(view.tolist())
        return _in_range(low, view)
    return _pack(view.tolist())


MANY = 256
"""From so many tokens on, work on all of them at once is quicker."""


def _halved(view: memoryview) -> bytes:
    """Tokens of eight bytes each, in four bytes each."""
    import torch

    words = torch.frombuffer(view, dtype=torch.int64)
    least, most = words.aminmax()
    if int(least) < 0 or int(most) >= TOKEN_LIMIT:
        raise _bad_token(view.tolist())
    packed = bytearray(TOKEN_BYTES * len(view))
    torch.frombuffer(packed, dtype=torch.int32).copy_(words)
    return bytes(packed)


UNKNOWN = -1
"""Stands in a key for an extra key that no number was given to: no node has it."""
FEW = 1024
"""Numbers of extra keys that are kept without asking whether they are in use."""


class KeyMaker:
    """Makes the key elements, which the tree compares, from a sequence's tokens.

    With a lookahead of k, an element is the token together with the k tokens that follow it, so that two prefixes share
    a page only if everything that its content depends on is equal; the last k tokens have no element yet.

    Extra keys replace the tokens at their positions by numbers, which are exact within this cache. A number is given
    when a sequence is opened (``name_extra``). A match only looks numbers up, so it leaves nothing behind. A number is
    forgotten when nothing uses it any more (``keep``), and never given twice: a key from before must not match data
    from after.
    """

    __slots__ = ("_kept", "_meant", "_next", "_numbers", "element_bytes", "lookahead")

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.element_bytes = TOKEN_BYTES * (lookahead + 1)
        self._numbers: dict[tuple[Hashable, int, bool], int] = {}
        self._meant: dict[int, tuple[Hashable, int, bool]] = {}
        self._next = -TOKEN_LIMIT
        self._kept = 0

    def widen(self, tokens: bytes | bytearray) -> bytes:
        """The elements of ``tokens``: one for each but the last ``lookahead`` of them."""
        k = self.lookahead
        if not k:
            return bytes(tokens)
        single = array("i", bytes(tokens))
        count = len(single) - k
        if count <= 0:
            return b""
        wide = array("i", bytes(count * self.element_bytes))
        for i in range(k + 1):
            wide[i :: k + 1] = single[i : i + count]
        return wide.tobytes()

    # ------------------------------------------------------------ extra keys
    def with_extra(self, tokens: bytes, spans: Iterable[Span]) -> bytes:
        """``tokens`` with the positions of ``spans`` replaced by the numbers that are known."""
        known = self._numbers
        return _replaced(tokens, spans, lambda key, below, first: known.get((exact_key(key), below, first), UNKNOWN))

    def name_extra(self, tokens: bytes, spans: Iterable[Span]) -> bytes:
        """``with_extra``; what has no number yet is given one."""
        return _replaced(tokens, spans, self._number)

    def _number(self, key: Hashable, below: int, first: bool) -> int:
        what = (exact_key(key), below, first)
        number = self._numbers.get(what)
        if number is None:
            number = self._next
            if number == UNKNOWN:
                raise InputError("no number is left for another extra key: flush the cache, or make another one")
            self._next += 1
            self._numbers[what] = number
            self._meant[number] = (key, below, first)
        return number

    def crowded(self, nodes: int) -> bool:
        """Whether there are so many numbers that it is worth a look at ``nodes`` nodes which of them are in use."""
        return len(self._meant) > max(FEW, 2 * self._kept, nodes)

    def keep(self, used: Set[int]) -> None:
        """Forget all numbers but those in ``used``, and those that these stand on."""
        kept: dict[int, tuple[Hashable, int, bool]] = {}
        for number in used:
            while number < 0 and number not in kept and number in self._meant:
                kept[number] = self._meant[number]
                number = kept[number][1]
        self._meant = kept
        self._numbers = {(exact_key(key), below, first): number for number, (key, below, first) in kept.items()}
        self._kept = len(kept)

    def forget(self) -> None:
        """Forget all numbers. No tree may refer to them any more."""
        self.keep(frozenset())

    @property
    def meant(self) -> Mapping[int, tuple[Hashable, int, bool]]:
        """By number: the extra key, the token or number that it replaces, and whether its span begins there."""
        return self._meant

    def extra_in(self, key: bytes, start: int) -> tuple[Span, ...]:
        """The extra keys of the positions from ``start`` on whose elements are ``key``, cut off where ``key`` is."""
        if not self._meant or key[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            return ()
        return self._spans_of(array("i", key)[:: self.lookahead + 1], start)

    def tokens_in(self, key: bytes) -> Tokens:
        """The tokens whose elements are ``key``, with their extra keys: ``lookahead`` more than there are elements."""
        k = self.lookahead
        if not k and not self._meant:
            return Tokens(key)
        wide = array("i", key)
        numbers = wide[:: k + 1] + wide[len(wide) - k :] if k else wide
        if key[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            return Tokens(numbers.tobytes())
        spans = self._spans_of(numbers, 0)
        for at, number in enumerate(numbers):
            while number < 0:
                number = self._meant[number][1]
            numbers[at] = number
        return with_spans(Tokens(numbers.tobytes()), spans)

    def _spans_of(self, numbers: Iterable[int], start: int) -> tuple[Span, ...]:
        """The spans of extra keys that ``numbers`` stand for, at the positions from ``start`` on.

        They are in such an order that the same tokens get the same numbers with them.
        """
        found: list[list[Any]] = []
        before: list[list[Any]] = []  # the spans of the position before, the last of them first
        for at, number in enumerate(numbers, start):
            left = iter(before)
            here: list[list[Any]] = []
            while number in self._meant:
                extra_key, number, first = self._meant[number]
                exact = exact_key(extra_key)
                span = None if first else next((each for each in left if exact_key(each[2]) == exact), None)
                if span is None:
                    span = [at, at, extra_key]
                    above = next((place for place, each in enumerate(found) if here and each is here[-1]), len(found))
                    found.insert(above, span)
                span[1] = at + 1
                here.append(span)
            before = here
        return tuple((low, high, extra_key) for low, high, extra_key in found)

    def meaning(self, page: bytes) -> tuple[bytes, bytes] | None:
        """A page of elements in a form that is the same in every process: (without these numbers, their meaning).

        None if an extra key has no such form: it may be any hashable object.
        """
        if page[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            return page, b""
        numbers = array("i", page)
        said = []
        for at, number in enumerate(numbers):
            if number < 0:
                text = self._lasting_name(number)
                if text is None:
                    return None
                said.append(f"{at}:{text}")
                numbers[at] = 0
        return numbers.tobytes(), "\n".join(said).encode()

    def _lasting_name(self, number: int) -> str | None:
        """The meaning of a number, as text: an extra key over a token, or over another number."""
        meant = self._meant.get(number)
        if meant is None:
            return None
        key, below, first = meant
        said, under = _lasting(key), str(below) if below >= 0 else self._lasting_name(below)
        return None if said is None or under is None else f"({said},{under},{first})"


def spans_of(tokens: Tokens, extra: object) -> tuple[Span, ...]:
    """The extra keys that ``tokens`` have, and the spans of ``extra``, checked; what is in both counts once."""
    if not tokens.extra:
        return spans_in(extra, tokens.count)
    known = {(start, end, exact_key(key)) for start, end, key in tokens.extra}
    given = spans_in(extra, tokens.count)
    return (*tokens.extra, *(span for span in given if (*span[:2], exact_key(span[2])) not in known))


def spans_in(extra: object, count: int) -> tuple[Span, ...]:
    """Check the (start, end, key) spans of extra keys over ``count`` tokens."""
    try:
        spans = tuple((index(start), index(end), key) for start, end, key in extra)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise InputError(f"extra takes (start, end, key) spans of token positions: {error}") from None
    for start, end, key in spans:
        if not 0 <= start < end <= count:
            raise InputError(f"extra key span [{start}, {end}) lies outside of the {count} tokens")
        try:
            hash(key)
        except TypeError:
            raise InputError(f"an extra key must be hashable, got {type(key).__name__}") from None
    return spans


def _replaced(tokens: bytes, spans: Iterable[Span], number_of: Callable[[Hashable, int, bool], int]) -> bytes:
    out = array("i", bytes(tokens))
    for start, end, key in spans:
        for i in range(start, end):
            out[i] = number_of(key, out[i], i == start)
    return out.tobytes()


def numbers_in(key: bytes | bytearray) -> Iterable[int]:
    """The numbers in ``key`` that stand for extra keys."""
    if key[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
        return ()
    return {number for number in array("i", bytes(key)) if number < 0}


def exact_key(key: Hashable) -> Hashable:
    """``key`` so that only what is the same in a store is equal: 1, True and 1.0 are three keys."""
    said = _lasting(key)
    if said is not None:
        return said
    if isinstance(key, frozenset):
        return frozenset(map(exact_key, key))
    return tuple(map(exact_key, key)) if isinstance(key, tuple) else (type(key), key)


def _lasting(what: object) -> str | None:
    """A key as text that means the same in every process; None if there is none."""
    if isinstance(what, tuple):
        parts = [_lasting(part) for part in what]
        return None if None in parts else f"({','.join(map(str, parts))})"
    if type(what) is int:
        return hex(what)  # Python refuses decimal digits of very large numbers
    return repr(what) if type(what) in (str, bytes, bool, float) else None


class Elements:
    """The key elements of a growing sequence, where they differ from its tokens.

    ``single`` are the tokens with extra keys in their places, if there are any.
    """

    __slots__ = ("maker", "single", "wide")

    def __init__(self, maker: KeyMaker, wide: bytes, single: bytes | None) -> None:
        self.maker = maker
        self.wide = bytearray(wide)
        self.single = None if single is None else bytearray(single)


class NamedTokens:
    """The known tokens of a growing sequence, and their key elements.

    The prompt is never copied: appended tokens are kept separately. ``count`` is the number of tokens. ``_wide`` are
    the elements, where they differ from the tokens.
    """

    __slots__ = ("_head", "_maker", "_more", "_wide", "count", "extra")

    _head: bytes
    _more: bytes | bytearray
    _wide: Elements | None
    extra: tuple[Span, ...]
    """The spans of those that have an extra key."""

    def __init__(
        self, maker: KeyMaker, tokens: Tokens, key: bytes, single: bytes | None, extra: Iterable[Span] = ()
    ) -> None:
        """``tokens`` are a prompt whose elements are ``key``; ``single`` as ``Elements`` takes it."""
        self._maker = maker
        self.extra = tuple(extra)
        self._head = tokens
        self._more = b""
        self._wide = None if key is tokens else Elements(maker, key, single)
        self.count = len(tokens) // TOKEN_BYTES

    @property
    def tokens(self) -> Tokens:
        """All tokens."""
        return with_spans(Tokens(self._head + self._more), self.extra)

    @property
    def extra_numbers(self) -> Iterable[int]:
        """The numbers of the extra keys among them."""
        wide = self._wide
        return () if wide is None or wide.single is None else numbers_in(wide.single)

    def append(self, tokens: Tokens, extra: tuple[Span, ...] = ()) -> None:
        """Append ``tokens``, of which the spans of ``extra`` have extra keys."""
        single: bytes = tokens
        if extra:
            single = self._maker.name_extra(tokens, extra)  # first: there may be no number left
            self._keep_single()
            self.extra = (*self.extra, *moved(extra, self.count))
        known = self._more
        if not known:
            self._more = tokens
        elif known.__class__ is bytearray:
            known += tokens
        else:
            self._more = bytearray(known) + tokens
        self.count += len(tokens) // TOKEN_BYTES
        if self._wide is not None:
            self._widen(self._wide, single)

    def _keep_single(self) -> None:
        """From now on the elements are not those of the tokens alone."""
        wide, tokens = self._wide, self._tokens_from(0)
        if wide is None:
            self._wide = Elements(self._maker, tokens, tokens)
        elif wide.single is None:
            wide.single = bytearray(tokens)

    def _widen(self, known: Elements, more: bytes) -> None:
        at = len(known.wide) // known.maker.element_bytes * TOKEN_BYTES
        if known.single is None:
            known.wide += known.maker.widen(self._tokens_from(at))
        else:
            known.single += more
            known.wide += known.maker.widen(known.single[at:])

    def _tokens_from(self, start: int) -> bytes:
        split = len(self._head)
        if start >= split:
            return bytes(self._more[start - split :])
        return self._head[start:] + self._more

    def key_between(self, first: int, last: int) -> bytes:
        """The bytes of the key's elements [first, last)."""
        if self._wide is not None:
            width = self._wide.maker.element_bytes
            return bytes(self._wide.wide[first * width : last * width])
        head = self._head
        split = len(head)
        start, end = first * TOKEN_BYTES, last * TOKEN_BYTES
        if end <= split:
            return head[start:end]
        if start < split:
            return head[start:] + self._more[: end - split]
        return bytes(self._more[start - split : end - split])

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` tokens."""
        size = count * TOKEN_BYTES
        split = len(self._head)
        self._more = bytearray(self._more[: max(0, size - split)])
        self._head = self._head[:size]
        self.count = count
        self.extra = clipped(self.extra, 0, count)
        known = self._wide
        if known is not None:
            if known.single is not None:
                del known.single[size:]
            del known.wide[max(0, count - known.maker.lookahead) * known.maker.element_bytes :]


def namespace_of(given: object) -> str:
    """Return a namespace as a plain string, or raise ``InputError``."""
    if not isinstance(given, str):
        raise InputError(f"a namespace must be a string, got {given!r}")
    return str(given)
