"""An order of eviction for vLLM's own host tier: first what serves no boundary, then what was used least recently.

vLLM's ``OffloadingConnector`` keeps chunks, and asks a policy which go. A chunk of a window is of use only to a prompt
whose hit ends at most a window behind it, and a state only to one whose hit ends there. Most hits end where an earlier
prompt, an earlier answer or an earlier hit ended. Chunks of windows and states that serve no such boundary go first.

vLLM tells a policy nothing of the groups, so its name does: ``ReachPolicy(1=8,2=1)`` says that a hit needs the last 8
chunks of group 1 and the last one of group 2, and all chunks of the other groups.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "eviction_policy": "ReachPolicy(1=8,2=1)", "cache_policy_module_path": "prefixloom_vllm.reach_policy", ...}
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

NAME = re.compile(r"ReachPolicy\((\d+=[1-9]\d*(?:,\d+=[1-9]\d*)*)\)")


def __getattr__(name: str) -> type[ReachPolicy]:
    """Make the policy whose name says what the groups need; vLLM asks this module for it."""
    found = NAME.fullmatch(name)
    if found is None:
        raise AttributeError(
            f"eviction_policy {name!r}: say which groups need only the end of a path, and how many chunks of it, as in "
            f"'ReachPolicy(1=8,2=1)'"
        )
    windows = {int(group): int(chunks) for group, chunks in (each.split("=") for each in found[1].split(","))}
    return type("ReachPolicy", (ReachPolicy,), {"windows": windows})


@attrs.define
class Prefill:
    """How far one request was stored by steps of several chunks, in tokens: to the end of its prompt."""

    end: int = 0


class ReachPolicy(CachePolicy):
    """Chunks in two queues, each with the least recently used first: those that serve no boundary, and all others."""

    windows: ClassVar[Mapping[int, int]] = {}
    """Of each group that needs only the end of a path: how many chunks."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        self.chunks: dict[bytes, Any] = {}
        self.serving: OrderedDict[bytes, None] = OrderedDict()
        self.idle: OrderedDict[bytes, None] = OrderedDict()

    def get(self, key: bytes) -> Any:
        return self.chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        self.chunks[key] = chunk
        self.serving[key] = None  # its request runs on

    def remove(self, key: bytes) -> None:
        del self.chunks[key]
        self.serving.pop(key, None)
        self.idle.pop(key, None)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        for key in reversed([*keys]):
            for queue in (self.serving, self.idle):
                if key in queue:
                    queue.move_to_end(key)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Note how far a request's prefill has come: a step stores these chunks."""
        places = {req_context.get_offload_key_position(key) or 0 for key in keys}
        if len(places) > 1:
            req_context.set_state(Prefill(max(places)))

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], insertion_only_keys: set[bytes], reused_keys: set[bytes],
        req_context: Any,
    ) -> None:  # fmt: skip
        """Mark the chunks of a request that has ended as used now, the end of its path first."""
        places: dict[bytes, int] = {}
        for keys in key_groups:
            for key in keys:
                places[key] = req_context.get_offload_key_position(key) or 0
        if not places:
            return
        prefill = req_context.get_state(Prefill)
        reused = [places[key] for key in reused_keys if key in places]
        ends = {max(places.values()), max(reused, default=0), 0 if prefill is None else prefill.end}
        chunk = min(place for place in places.values() if place) if any(places.values()) else 1
        for key in reversed(order_request_keys(key_groups, req_context)):
            if key in self.chunks:
                window = self.windows.get(get_offload_group_idx(key))
                # A hit leaves a token to compute, so it may end a chunk before the end of a prompt.
                serves = window is None or any(0 <= end - places[key] <= window * chunk for end in ends)
                self.serving.pop(key, None)
                self.idle.pop(key, None)
                (self.serving if serves else self.idle)[key] = None

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict exactly ``n`` chunks that no copy reads or writes. None, and nothing evicted: there are fewer."""
        found: list[bytes] = []
        for queue in (self.idle, self.serving):
            for key in queue:
                if len(found) == n:
                    break
                if key not in protected and self.chunks[key].ref_cnt == 0:
                    found.append(key)
        if len(found) < n:
            return None
        gone = [(key, self.chunks[key]) for key in found]
        for key in found:
            self.remove(key)
        return gone
