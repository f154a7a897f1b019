"""SGLang's KV events, from the journal of the books.

With ``--kv-events-config`` SGLang publishes which pages are cached, so that routers can send a request where its prefix
is. SGLang's own recorder makes the events, with SGLang's hashes, from a node of a tree. So pages that follow each other
are shown to it as a node, below another node that stands for all tokens before them.

As in SGLang's own cache, pages of full attention are announced, and windows and states are not. A page is announced
only while it leads to a boundary: while a request can resume at its end or below it. Plain attention can be resumed at
each page.
"""

from __future__ import annotations

import json
import logging
import struct
from array import array
from typing import Any

from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values

from prefixloom import Cache, Change
from prefixloom_resumable import Announcements, PageRange, ResumablePages, Run

log = logging.getLogger("sglang.prefixloom")

Label = tuple[str | None, str | None]
"""SGLang's extra key and salt of a namespace."""


class Events:
    """What SGLang takes events from, once in a step. An error in here does not end SGLang's scheduler."""

    def __init__(self, books: Cache, params: Any) -> None:
        """``params`` are SGLang's ``CacheInitParams``."""
        self._page_size = params.page_size
        self._options: dict[str, Any] = {"dynamo_format": params.dynamo_kv_event_format}
        names = getattr(params, "kv_event_lora_names", None)
        if names is not None:
            self._options["lora_names"] = names
        self._is_bigram = books.composition.lookahead > 0
        self._recorder, self._single = self._new_recorder(), self._new_recorder()
        self._pages = ResumablePages(books.composition, label_of, ("device",), self._hashes)
        self._announcements = Announcements(books, self._announce, self._withdraw, log)

    @property
    def failures(self) -> int:
        """Errors of the code for events so far."""
        return self._announcements.failures

    def take(self) -> list[Any]:
        """Return the events since the last call: pages removed, from the leaves up, and then pages stored."""
        return self._announcements.take()

    def _new_recorder(self) -> Any:
        return KVCacheEventRecorder(enabled=True, page_size=self._page_size, **self._options)

    def _announce(self, changes: list[Change]) -> list[Any]:
        if not changes:
            return []
        found = self._pages.apply(changes)
        if found.cleared:
            self._recorder.record_all_cleared()
        gone, come = found.leading(0)
        for pages in reversed(gone):
            self._remove(pages)
        for pages in come:
            self._store(pages)
        events: list[Any] = self._recorder.take()
        return events

    def _withdraw(self) -> list[Any]:
        self._recorder, self._single = self._new_recorder(), self._new_recorder()
        self._pages.begin_again()
        self._recorder.record_all_cleared()
        events: list[Any] = self._recorder.take()
        return events

    def _store(self, pages: PageRange) -> None:
        """Record pages as stored.

        Fast path: SGLang's recorder makes an event of the first page, and what it has of further pages follows from
        their tokens and hashes. Not with pairs of tokens, nor where it hashes the hashes once more.
        """
        count = pages.end - pages.first
        if count > 1 and not self._is_bigram:
            first = PageRange(pages.run, pages.first, pages.first + 1)
            self._single.record_store(self._node(first))
            (event,) = self._single.take()
            numbers = self._numbers(pages)
            if event.block_hashes == numbers[:1]:
                event.block_hashes += numbers[1:]
                event.token_ids += self._tokens(PageRange(pages.run, pages.first + 1, pages.end))
                self._recorder.enqueue(event)
                return
        self._recorder.record_store(self._node(pages))

    def _remove(self, pages: PageRange) -> None:
        """Record pages as removed, from the leaves up, by the same fast path."""
        last = PageRange(pages.run, pages.end - 1, pages.end)
        self._single.record_remove(self._node(last))
        (event,) = self._single.take()
        numbers = self._numbers(pages)[::-1]
        if event.block_hashes == numbers[:1]:
            event.block_hashes += numbers[1:]
            self._recorder.enqueue(event)
            return
        for at in range(pages.end - 1, pages.first - 1, -1):
            self._recorder.record_remove(self._node(PageRange(pages.run, at, at + 1)))

    def _numbers(self, pages: PageRange) -> list[int]:
        """Return the hashes of pages as numbers, as SGLang writes them if it hashes no namespace in."""
        digits = "".join([name[:16] for name in self._pages.names(pages)])
        return [*struct.unpack(f">{pages.end - pages.first}q", bytes.fromhex(digits))]

    def _tokens(self, pages: PageRange) -> list[int]:
        return self._pages.tokens(pages).tolist()

    def _node(self, pages: PageRange) -> Node:
        """Make a node of SGLang's tree of some pages."""
        node = self._unnamed(pages.run, pages.first, pages.end)
        node.hash_value = node.event_hash_value = self._pages.names(pages)
        return node

    def _unnamed(self, run: Run, first: int, end: int) -> Node:
        above = Node(RadixKey(array("q"), None), None, [])
        before = run.name_above(first)
        if before is not None:
            above = Node(self._key(array("q", [0, 0]), run.label), above, [before])
        tokens = array("q", self._tokens(PageRange(run, first, end)))
        return Node(self._key(tokens, run.label), above, None)

    def _key(self, tokens: array[int], label: Label) -> Any:
        return RadixKey(tokens, label[0], is_bigram=self._is_bigram, cache_salt=label[1])

    def _hashes(self, run: Run, first: int, end: int) -> list[str]:
        """Return SGLang's hashes of some pages, as its events have them."""
        hashes: list[str] = compute_node_event_hash_values(self._unnamed(run, first, end), self._page_size)
        return hashes


class Node:
    """What SGLang's recorder asks of a node. The root has no parent and no hashes."""

    __slots__ = ("event_hash_value", "hash_value", "key", "parent")

    def __init__(self, key: Any, parent: Node | None, hashes: list[str] | None) -> None:
        self.key = key
        self.parent = parent
        self.hash_value = hashes
        self.event_hash_value = hashes


def label_of(namespace: str) -> Label:
    """Return SGLang's extra key and salt, of which a namespace was made."""
    extra_key, cache_salt = json.loads(namespace) if namespace else (None, None)
    return extra_key, cache_salt
