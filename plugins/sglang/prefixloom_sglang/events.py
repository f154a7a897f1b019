"""SGLang's KV events, from the journal of the books.

With ``--kv-events-config`` SGLang publishes which pages are cached, so that routers can send a request where its prefix
is. SGLang's own recorder makes the events, with SGLang's hashes, from a node of a tree. So what is told is shown to it
as a node, below another node that stands for all tokens before it.

As in SGLang's own cache, pages of full attention are told, and windows and states are not. Where a model has these, a
page is told only while a request can resume at its end or below it (``HybridPages``). Plain attention can be resumed at
each page, so that changes are told as they are (``PlainPages``).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Protocol

import attrs
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, compute_node_hash_values

from prefixloom import Cache, Change
from prefixloom_resumable import TOKEN_BYTES, PageNode, ResumablePages, runs

from .composition import FULL

Label = tuple[str | None, str | None]
"""SGLang's extra key and salt of a namespace."""


class Events:
    """What SGLang takes events from. The journal is read when they are taken, once in a step."""

    def __init__(self, books: Cache, params: Any) -> None:
        """``params`` are SGLang's ``CacheInitParams``."""
        self._books = books
        names = getattr(params, "kv_event_lora_names", None)
        options = {} if names is None else {"lora_names": names}
        self._recorder = KVCacheEventRecorder(
            enabled=True, page_size=params.page_size, dynamo_format=params.dynamo_kv_event_format, **options
        )
        is_plain = [part.name for part in books.composition.parts] == [FULL]
        self._pages: Pages = (PlainPages if is_plain else HybridPages)(books, params.page_size)
        self._journal = books.journal()
        self._recorder.record_all_cleared()

    def take(self) -> list[Any]:
        """The events since the last call."""
        missing, changes = self._journal.missing, self._journal.take()
        if missing:  # there were too many to keep: begin again with what there is
            changes = [Change("cleared"), *self._books.contents()]
        for each in self._pages.told(changes):
            if each.kind == "cleared":
                self._recorder.record_all_cleared()
            elif each.kind == "stored":
                self._recorder.record_store(each.node)
            else:
                self._recorder.record_remove(each.node)
        events: list[Any] = self._recorder.take()
        return events


@attrs.frozen
class Told:
    """Something to tell: "stored", "removed" or "cleared", and the pages as a node of SGLang's tree."""

    kind: str
    node: Node | None = None


class Pages(Protocol):
    """What is to be told of changes."""

    def told(self, changes: list[Change]) -> Iterator[Told]: ...


class PlainPages:
    """Pages of full attention alone: each is told from when it is stored until it is removed."""

    def __init__(self, books: Cache, page_size: int) -> None:
        self._page_size = page_size
        self._lookahead = books.composition.lookahead

    def told(self, changes: list[Change]) -> Iterator[Told]:
        for change in changes:
            if change.kind == "cleared":
                yield Told("cleared")
            elif change.kind != "refused":
                for start, end in change.spans:
                    yield Told(change.kind, self._node(change, start, end))

    def _node(self, change: Change, start: int, end: int) -> Node:
        """The tokens [start, end) of the path to a change."""
        tokens = array("q", change.tokens.tolist()[: end + self._lookahead])
        path = key_of(tokens, label_of(change.namespace), self._lookahead > 0)
        above = root()
        if start:
            above = Node(path[:start], above, None)
            above.hash_value = compute_node_hash_values(above, self._page_size)
        return Node(path[start:end], above, None)


class HybridPages:
    """Pages that lead to where a request can resume. What SGLang calls a page is kept with it, as ``Name``."""

    def __init__(self, books: Cache, page_size: int) -> None:
        self._page_size = page_size
        self._pages = ResumablePages(books.composition, root_of)
        self._is_bigram = books.composition.lookahead > 0

    def told(self, changes: list[Change]) -> Iterator[Told]:
        """Tell what is gone from the leaves up, and what has come from the root down."""
        if not changes:
            return
        if any(change.kind == "cleared" for change in changes):
            yield Told("cleared")
        found = self._pages.apply(changes)
        gone, come = found.told(0)
        for node in reversed(gone):
            yield Told("removed", self._node([node]))
        for run in runs(come):
            yield Told("stored", self._node(run))

    def _node(self, run: list[PageNode]) -> Node:
        """Pages that follow each other. Those before them have names already: whatever is told has been told first."""
        label: Label = run[0].label
        size = self._pages.page * TOKEN_BYTES
        encoded = b"".join(page.key[:size] for page in run) + run[-1].key[size:]
        tokens = array("q", array("I", encoded))
        before = run[0].parent
        assert before is not None
        above = root()
        if before.parent is not None:
            above = Node(key_of(array("q", [0, 0]), label, self._is_bigram), above, [before.name.hash])
            above.event_hash_value = [before.name.event_hash]
        node = Node(key_of(tokens, label, self._is_bigram), above, None)
        if any(page.name is None for page in run):  # some may have been told before
            hashes = node.hash_value = compute_node_hash_values(node, self._page_size)
            event_hashes = hashes if label == (None, None) else compute_node_event_hash_values(node, self._page_size)
            for page, own, event in zip(run, hashes, event_hashes, strict=True):
                page.name = Name(own, event)
        node.hash_value = [page.name.hash for page in run]
        node.event_hash_value = [page.name.event_hash for page in run]
        return node


@attrs.frozen
class Name:
    """SGLang's hashes of one page: of its tokens, and with the salt."""

    hash: str
    event_hash: str


class Node:
    """What SGLang's recorder asks of a node. The root has no parent and no hashes."""

    __slots__ = ("event_hash_value", "hash_value", "key", "parent")

    def __init__(self, key: Any, parent: Node | None, hashes: list[str] | None) -> None:
        self.key = key
        self.parent = parent
        self.hash_value = hashes
        self.event_hash_value: list[str] | None = hashes


def root() -> Node:
    return Node(RadixKey(array("q"), None), None, [])


def key_of(tokens: array[int], label: Label, is_bigram: bool) -> Any:
    return RadixKey(tokens, label[0], is_bigram=is_bigram, cache_salt=label[1])


def label_of(namespace: str) -> Label:
    """SGLang's extra key and salt, which a namespace was made of."""
    extra_key, cache_salt = json.loads(namespace) if namespace else (None, None)
    return extra_key, cache_salt


def root_of(namespace: str) -> tuple[bytes, Label]:
    """What the digests of a namespace's pages begin with."""
    return blake2b(namespace.encode(), digest_size=16).digest(), label_of(namespace)
