"""KV events: announces to routers and dashboards what a cache has cached, in the wire form of vLLM and SGLang.

| module | for |
|---|---|
| ``wire`` | events, batches and messages |
| ``hashes`` | what a page is called |
| ``mirror`` | a copy of what is cached, that makes events of a journal's changes and knows where requests can resume |
| ``publisher`` | sends them, and answers those who missed some |
| ``rebuilt`` | what is cached, rebuilt from events |
| ``follower`` | subscribes, notices gaps and repairs them |
| ``verify`` | ``python -m prefixloom_events.verify ENDPOINT`` |

First read ``mirror``, then ``publisher``.
"""

from __future__ import annotations

from .follower import EventFollower, FollowerCounts, OrderedEvents
from .hashes import PageLabel, salt_digest
from .mirror import Mirror
from .publisher import EventPublisher, PublisherCounts
from .rebuilt import RebuiltCache
from .wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode_batch, encode_batch

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventFollower",
    "EventPublisher",
    "FollowerCounts",
    "Mirror",
    "OrderedEvents",
    "PageLabel",
    "PublisherCounts",
    "RebuiltCache",
    "decode_batch",
    "encode_batch",
    "salt_digest",
]
