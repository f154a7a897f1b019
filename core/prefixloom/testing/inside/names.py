"""Numbers for prefixes: tests use them to tell whose content a slot holds.

The number of a prefix is also its checksum: a forward pass in a test writes content that is derived from it. The bench
of the conformance kit and the sets of the oracle share these numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from ...keys.tokens import Span

Extra = Span


class Names:
    """A number for every prefix. The empty prefix of every namespace is 0, as zeros are the state before any token."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str, Hashable], int] = {}
        self.namespaces: list[str] = [""]

    def child(self, prefix: int, namespace: str, token: Hashable) -> int:
        """Return the number of ``prefix`` with one more token."""
        known = self._ids.get((prefix, namespace, token))
        if known is None:
            known = self._ids[prefix, namespace, token] = len(self.namespaces)
            self.namespaces.append(namespace)
        return known

    def tokens(self, prefixes: Sequence[int]) -> list[Hashable]:
        """Return the tokens of a prefix, given the numbers that ``prefixes`` returned for it."""
        last = {number: token for (_, _, token), number in self._ids.items()}
        return [last[number] for number in prefixes[1:]]

    def prefixes(self, namespace: str, tokens: Sequence[Hashable]) -> list[int]:
        """Return the numbers of tokens[:0], tokens[:1], ... tokens[:n]."""
        out = [0]
        for token in tokens:
            out.append(self.child(out[-1], namespace, token))
        return out


def told_apart(key: Hashable) -> Hashable:
    """Return an extra key so that it is equal to no key of another type: 1, True and 1.0 are three keys."""
    return tuple(map(told_apart, key)) if isinstance(key, tuple) else (type(key).__name__, key)


def with_extra(tokens: Iterable[int], spans: Iterable[Extra]) -> list[Hashable]:
    """Return the tokens, with those inside a span replaced by what their content depends on."""
    out: list[Hashable] = list(tokens)
    for start, end, key in spans:
        out[start:end] = [(told_apart(key), out[i], i == start) for i in range(start, end)]
    return out
