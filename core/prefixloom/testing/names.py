"""Names of prefixes: a number for each, by which tests tell whose content a slot holds.

The number of a prefix is also its checksum: what a forward pass writes into a slot is derived from it. Shared by the
conformance kit and by the brute-force model of the property test.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

Extra = tuple[int, int, Hashable]


class Names:
    """A number for every prefix: 0 is the empty one of every namespace, as zeros are the state before any token."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str, Hashable], int] = {}
        self.namespaces: list[str] = [""]

    def child(self, prefix: int, namespace: str, token: Hashable) -> int:
        """The number of ``prefix`` with one more token."""
        known = self._ids.get((prefix, namespace, token))
        if known is None:
            known = self._ids[prefix, namespace, token] = len(self.namespaces)
            self.namespaces.append(namespace)
        return known

    def prefixes(self, namespace: str, tokens: Sequence[Hashable]) -> list[int]:
        """The numbers of tokens[:0], tokens[:1], ... tokens[:n]."""
        out = [0]
        for token in tokens:
            out.append(self.child(out[-1], namespace, token))
        return out


def with_extra(tokens: Iterable[int], spans: Iterable[Extra]) -> list[Hashable]:
    """Tokens, each span's replaced by what its content depends on."""
    out: list[Hashable] = list(tokens)
    for start, end, key in spans:
        out[start:end] = [(key, out[i], i == start) for i in range(start, end)]
    return out
