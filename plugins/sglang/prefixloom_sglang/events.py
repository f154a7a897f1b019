"""SGLang's KV events, from the journal of the books.

With ``--kv-events-config`` SGLang publishes which pages are cached, so that routers can send a request where its prefix
is. SGLang's own recorder makes the events, with SGLang's hashes, from a node of a tree. So each change of the journal
is shown to it as a node, below another node that stands for all tokens before it. As in SGLang's own cache, pages of
full attention are told, and windows and states are not.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_hash_values

from prefixloom import Cache, Change

from .composition import FULL


class Events:
    """What SGLang takes events from. The journal is read when they are taken, once in a step."""

    def __init__(self, books: Cache, params: Any) -> None:
        """``params`` are SGLang's ``CacheInitParams``."""
        self._books = books
        self._page_size = params.page_size
        self._lookahead = books.composition.lookahead
        names = getattr(params, "kv_event_lora_names", None)
        options = {} if names is None else {"lora_names": names}
        self._recorder = KVCacheEventRecorder(
            enabled=True, page_size=params.page_size, dynamo_format=params.dynamo_kv_event_format, **options
        )
        self._journal = books.journal()
        self._recorder.record_all_cleared()

    def take(self) -> list[Any]:
        """The events since the last call."""
        missing, changes = self._journal.missing, self._journal.take()
        if missing:  # there were too many to keep: begin again with what there is
            changes = [Change("cleared"), *self._books.contents()]
        for change in changes:
            if change.kind == "cleared":
                self._recorder.record_all_cleared()
            elif change.component == FULL:
                for start, end in change.spans:
                    node = self._node(change, start, end)
                    if change.kind == "stored":
                        self._recorder.record_store(node)
                    elif change.kind == "removed":
                        self._recorder.record_remove(node)
        events: list[Any] = self._recorder.take()
        return events

    def _node(self, change: Change, start: int, end: int) -> _Node:
        """The tokens [start, end) of the path to a change, as a node of SGLang's tree."""
        extra_key, cache_salt = json.loads(change.namespace) if change.namespace else (None, None)
        tokens = array("q", change.tokens.tolist()[: end + self._lookahead])
        path = RadixKey(tokens, extra_key, is_bigram=self._lookahead > 0, cache_salt=cache_salt)
        above = _Node(RadixKey(array("q"), None), None, [])
        if start:
            above = _Node(path[:start], above, None)
            above.hash_value = compute_node_hash_values(above, self._page_size)
        return _Node(path[start:end], above, None)


class _Node:
    """What SGLang's recorder asks of a node. The root has no parent and no hashes."""

    __slots__ = ("event_hash_value", "hash_value", "key", "parent")

    def __init__(self, key: Any, parent: _Node | None, hashes: list[str] | None) -> None:
        self.key = key
        self.parent = parent
        self.hash_value = hashes
        self.event_hash_value: list[str] | None = hashes
