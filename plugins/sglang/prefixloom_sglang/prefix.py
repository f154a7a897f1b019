"""Prefixes: what SGLang holds where its own cache has tree nodes.

A prefix is a match plan and the leases that were taken on it. SGLang keeps one for each request, locks and unlocks it,
and never looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefixloom import Cache, Lease, MatchPlan, Tokens

TOKEN_BYTES = 4


class Prefix:
    """A cached prefix of ``length`` tokens. A prefix of no tokens has no plan, and locking it does nothing."""

    __slots__ = ("_cache", "_leases", "_tokens", "counted", "length", "plan")

    def __init__(self, cache: Cache, plan: MatchPlan | None = None, tokens: Tokens | None = None) -> None:
        self._cache = cache
        self._leases: list[Lease] = []
        self._tokens = tokens
        self.plan = plan
        self.counted = plan is None
        """Whether the metrics have counted why it is not longer."""
        self.length = 0 if plan is None else plan.ready

    @property
    def key(self) -> bytes:
        """Where it lies. Prefixes that begin alike have keys that begin alike, token by token."""
        if self.plan is None or self._tokens is None:
            return b""
        namespace = self.plan.namespace.encode()
        return namespace + b"\0" * (TOKEN_BYTES - len(namespace) % TOKEN_BYTES) + self._tokens.part(0, self.length)

    def lock(self) -> None:
        """Protect what resuming at its end needs. ProtocolError: something of it was evicted since it was matched."""
        if self.plan is not None and self.length:
            self._leases.append(self._cache.lease(self.plan, exact=True))

    def unlock(self) -> None:
        """Undo the last ``lock`` that is not undone yet."""
        if self._leases:
            self._leases.pop().release()

    def uncover_state(self) -> None:
        """Protect pages alone from now on, as far as the last ``lock`` goes."""
        if self._leases:
            self._leases[-1].uncover_states()

    def pages(self, component: str) -> Sequence[int]:
        """Page numbers of one component by position; -1: not needed here, or absent."""
        if self._leases:
            return self._leases[-1].pages(component)
        return [] if self.plan is None or not self.length else self.plan.pages(component)

    def __repr__(self) -> str:
        return f"<Prefix of {self.length} tokens, locked {len(self._leases)} times>"


def depth_first(prefixes: Sequence[Prefix]) -> list[int]:
    """The indices of ``prefixes``, depth first, and of each branch first the part that has the most prefixes.

    SGLang's policy "dfs-weight" serves requests in this order.
    """
    keys = [prefix.key for prefix in prefixes]
    found: list[int] = []
    stack = [(list(range(len(keys))), 0)] if keys else []
    while stack:
        part, depth = stack.pop()
        depth = _agreeing([keys[i] for i in part], depth)
        children: dict[bytes, list[int]] = {}
        for i in part:
            children.setdefault(keys[i][depth : depth + TOKEN_BYTES], []).append(i)
        if len(children) < 2:  # they are equal
            found += part
            continue
        ending = children.pop(b"", None)  # a branch itself comes after what is below it
        if ending is not None:
            stack.append((ending, depth))
        stack += [(child, depth) for child in sorted(children.values(), key=len)]
    return found


def _agreeing(keys: Sequence[bytes], low: int) -> int:
    """How far all keys agree, in bytes of whole tokens, from ``low`` on."""
    first, last = min(keys), max(keys)
    high = min(len(first), len(last))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == last[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // TOKEN_BYTES * TOKEN_BYTES
