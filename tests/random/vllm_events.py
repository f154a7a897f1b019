"""A router that follows the events of the connector's host tier, and an oracle that says what it must have.

``tests.random.vllm_traffic`` runs both beside its random traffic. The oracle knows what the host has from
``Cache.contents``, and where requests can resume from ``Cache.peek``. It names blocks itself, by the same rule as the
traffic's requests do in place of vLLM's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from prefixloom import Cache
from prefixloom_vllm.events import MEDIUM, Form
from prefixloom_vllm.groups import Group

Span = tuple[int, int, str]


def hash_tokens(groups: Sequence[Group]) -> int:
    return math.gcd(*(group.tokens for group in groups))


def block_hashes(
    tokens: Sequence[int], size: int, salt: str | None, adapter: str | None, images: Iterable[Span]
) -> list[bytes]:
    """Return the names of all whole blocks of a path."""
    found: list[bytes] = []
    before = repr((salt, adapter)).encode()
    images = [*images]
    for start in range(0, len(tokens) // size * size, size):
        seen = [(max(lo, start) - start, min(hi, start + size) - start, key) for lo, hi, key in images
                if lo < start + size and hi > start]  # fmt: skip
        before = hashlib.sha256(before + repr((list(tokens[start : start + size]), seen)).encode()).digest()
        found.append(before)
    return found


def extra_keys(request: Any, start: int, end: int, size: int) -> list[Any]:
    return [extra_keys_of(request, at, at + size) for at in range(start, end, size)]


def extra_keys_of(request: Any, start: int, end: int) -> Any:
    """In place of vLLM's: the salt of a first block, and the images of a block with where they begin."""
    images = [
        (each.identifier, each.mm_position.offset - start)
        for each in request.mm_features
        if each.mm_position.offset < end and each.mm_position.offset + each.mm_position.length > start
    ]
    salt = [request.cache_salt] if request.cache_salt and not start else []
    return (*images, *salt) or None


def form(groups: Sequence[Group]) -> Form:
    """Events as plain objects."""

    def event(kind: str) -> Any:
        return lambda **fields: SimpleNamespace(kind=kind, **fields)

    kinds = {group.index: (f"kind {group.name}", None) for group in groups}
    return Form(
        event("stored"), event("removed"), event("cleared"), lambda name: name, extra_keys, kinds, hash_tokens(groups)
    )


class HostRouter:
    """What a router has of the host's blocks, by group: hash and tokens."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = {group.index: group for group in groups}
        self.blocks: dict[int, dict[bytes, tuple[int, ...]]] = {group.index: {} for group in groups}

    def apply(self, events: Iterable[Any]) -> int:
        """Follow some events, each of which must fit those before."""
        count = 0
        for event in events:
            count += 1
            if event.kind == "cleared":  # of all media
                self.blocks = {index: {} for index in self.blocks}
                continue
            blocks, group = self.blocks[event.group_idx], self.groups[event.group_idx]
            assert event.medium == MEDIUM and event.block_hashes
            if event.kind == "removed":
                for each in event.block_hashes:
                    assert blocks.pop(each, None) is not None, "a block is removed that was not announced"
                continue
            size = event.block_size
            assert size == group.tokens and len(event.token_ids) == size * len(event.block_hashes)
            assert event.kv_cache_spec_kind == f"kind {group.name}"
            if group.reach.closed_upward:
                assert event.parent_block_hash is None or event.parent_block_hash in blocks, "its parent is not there"
            for place, each in enumerate(event.block_hashes):
                assert each not in blocks, "a block is stored twice"
                blocks[each] = tuple(event.token_ids[place * size : (place + 1) * size])
        return count

    def tokens(self, group: Group, hashes: Sequence[bytes], size: int) -> int:
        """Return how many tokens a router counts, of a prompt whose blocks of ``size`` tokens have these names."""
        found, step = 0, group.tokens // size
        for at in range(step - 1, len(hashes), step):
            if hashes[at] not in self.blocks[group.index]:
                break
            found += group.tokens
        return found


def expected(cache: Cache, groups: Sequence[Group]) -> dict[int, dict[bytes, tuple[int, ...]]]:
    """Return what a router must have: by ``Cache.contents`` and ``Cache.peek``, from scratch."""
    size, page = hash_tokens(groups), cache.composition.page
    found: dict[int, dict[bytes, tuple[int, ...]]] = {group.index: {} for group in groups}
    by_name = {group.name: group for group in groups}
    for change in cache.contents():
        if change.tier != "device":
            continue
        name = change.namespace[change.namespace.rfind("\0") + 1 :]
        name = name[name.index("{") :] if "{" in name else ""
        named = json.loads(name) if name else {"adapter": None, "salt": None}
        tokens, extra = change.tokens.tolist(), list(change.tokens.extra)
        adapter = named["adapter"] and named["adapter"][0]
        hashes = block_hashes(tokens, size, named["salt"], adapter, extra)

        def enter(group: Group, end: int, tokens: Any = tokens, hashes: Any = hashes) -> None:
            found[group.index][hashes[end // size - 1]] = tuple(tokens[end - group.tokens : end])

        group = by_name[change.component]
        if not group.reach.closed_upward:
            ends = [end for lo, hi in change.spans for end in range(lo + group.tokens, hi + 1, group.tokens)]
            for end in ends if change.boundary is None else [change.boundary]:
                enter(group, end)
        for boundary in range(len(tokens) // page * page, 0, -page):
            spans = [(lo, min(hi, boundary), key) for lo, hi, key in extra if lo < boundary]
            if cache.peek(tokens[:boundary], namespace=name, extra=spans) == boundary:
                for each in groups:
                    if each.reach.closed_upward:
                        for end in range(each.tokens, boundary + 1, each.tokens):
                            enter(each, end)
                break
    return found
