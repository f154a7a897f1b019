"""Prefixes: what SGLang holds where its own cache has tree nodes.

A prefix is a match plan and the leases that were taken on it. SGLang keeps one for each request, locks and unlocks it,
and never looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefixloom import Cache, Lease, MatchPlan, Tokens, encode


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
    def path(self) -> tuple[str, Tokens]:
        """Its namespace and its tokens."""
        if self.plan is None or self._tokens is None:
            return "", encode(())
        return self.plan.namespace, self._tokens.part(0, self.length)

    def lock(self) -> None:
        """Protect what resuming at its end needs. ProtocolError: something of it was evicted since it was matched."""
        if self.plan is not None and self.length:
            self._leases.append(self._cache.lease(self.plan, exact=True))

    def unlock(self) -> None:
        """Undo the last ``lock`` that is not undone yet."""
        if self._leases:
            self._leases.pop().release()

    def uncover_state(self) -> None:
        """Protect pages alone from now on, and no state, in the last ``lock``."""
        if self._leases:
            self._leases[-1].uncover_states()

    def pages(self, component: str) -> Sequence[int]:
        """Return the page numbers of one component by position; -1: not needed here, or absent."""
        if self._leases:
            return self._leases[-1].pages(component)
        return [] if self.plan is None or not self.length else self.plan.pages(component)

    def __repr__(self) -> str:
        return f"<Prefix of {self.length} tokens, locked {len(self._leases)} times>"


def depth_first(prefixes: Sequence[Prefix]) -> list[int]:
    """Return the indices of ``prefixes`` depth first, and of each branch first the part with the most prefixes.

    SGLang's policy "dfs-weight" serves requests in this order.
    """
    texts: list[Tokens] = []
    namespaces: dict[str, list[int]] = {}
    for i, prefix in enumerate(prefixes):
        namespace, tokens = prefix.path
        texts.append(tokens)
        namespaces.setdefault(namespace, []).append(i)
    found: list[int] = []
    stack = sorted(namespaces.values(), key=len)
    while stack:
        part = stack.pop()
        depth = min(texts[i] for i in part).common(max(texts[i] for i in part))
        children: dict[bytes, list[int]] = {}
        for i in part:
            children.setdefault(texts[i].part(depth, depth + 1), []).append(i)
        if len(children) < 2:  # they are equal
            found += part
            continue
        ending = children.pop(b"", None)  # a branch itself comes after what is below it
        if ending is not None:
            stack.append(ending)
        stack += sorted(children.values(), key=len)
    return found
