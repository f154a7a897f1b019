"""What the host tells as KV events, without vLLM: random traffic beside an oracle, and single cases.

With vLLM installed, its own classes of requests, hashes and events are used as well.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import Buffer, Cache, Component, Manifest, Point, compose, encode
from prefixloom import Path as WholePath
from prefixloom_resumable import ResumablePages
from prefixloom_vllm.events import HostEvents
from prefixloom_vllm.groups import Group, groups_of
from tests.random.vllm_events import HostRouter, block_hashes, expected, form
from tests.random.vllm_traffic import run
from tests.support.vllm_specs import FULL, STATE, config


class Host:
    """A host's books of full attention and states, which are filled by hand, and their events."""

    def __init__(self, page: int = 4, **options: Any) -> None:
        self.groups: list[Group] = groups_of(config(FULL, STATE))
        names = [group.name for group in self.groups]
        content = [Buffer("content", (), "int64")]
        self.cache: Cache = compose(
            None,
            plugins=[
                Component(names[0], Manifest(content, page_size=4), WholePath()),
                Component(names[1], Manifest(content, grid=4), Point()),
            ],
            page_size=page, capacity={names[0]: 128, names[1]: 16}, debug=True,
        )  # fmt: skip
        self.events = HostEvents(self.groups, self.cache, form(self.groups))
        self.router = HostRouter(self.groups)

    def keep(self, request: Any, *stops: int, name: bool = True, salt: str = "") -> None:
        """Compute a prompt in chunks that end at ``stops``."""
        tokens = request.all_token_ids
        with self.cache.open(tokens, namespace=salt) as sequence:
            for stop in stops:
                sequence.grow(stop - sequence.reserved)
                with self.cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
        if name:
            self.events.name(request, salt, encode(tokens), ())

    def take(self) -> list[Any]:
        events = self.events.take()
        self.router.apply(events)
        return events


def asked(tokens: list[int], **fields: Any) -> Any:
    plain = {"lora_request": None, "mm_features": [], "cache_salt": None, **fields}
    return SimpleNamespace(all_token_ids=tokens, block_hashes=block_hashes(tokens, 4, None, None, ()), **plain)


def test_blocks_of_full_attention_are_told_while_a_state_lies_at_or_below_them() -> None:
    host, request = Host(), asked(list(range(24)))
    host.keep(request, 8, 24)
    pages, states, _ = host.take()
    assert pages.block_hashes == request.block_hashes and pages.parent_block_hash is None
    assert pages.token_ids == list(range(24)) and (pages.group_idx, states.group_idx) == (0, 1)
    assert states.block_hashes == [request.block_hashes[1]] and states.token_ids == [4, 5, 6, 7]
    assert set(host.router.blocks[1]) == {request.block_hashes[1], request.block_hashes[5]}
    host.cache.evict({host.groups[1].name: 1})  # the one at 8: the pages above it lead to 24
    (gone,) = host.take()
    assert (gone.group_idx, gone.block_hashes) == (1, [request.block_hashes[1]])
    assert host.router.tokens(host.groups[0], request.block_hashes, 4) == host.cache.peek(range(24)) == 24
    host.cache.evict({host.groups[1].name: 9})
    host.take()
    assert not any(host.router.blocks.values())
    assert host.cache.stats().components[host.groups[0].name].cached, "full attention has its pages still"


def test_a_path_that_goes_on_is_told_below_what_was_told_before() -> None:
    host, first, second = Host(), asked(list(range(8))), asked(list(range(16)))
    host.keep(first, 8)
    host.take()
    host.keep(second, 16)
    told = [event for event in host.take() if event.group_idx == 0]
    assert [(event.parent_block_hash, event.block_hashes) for event in told] == [
        (first.block_hashes[1], second.block_hashes[2:])
    ]


def test_a_flush_tells_each_block_as_removed_and_what_comes_back_as_stored() -> None:
    host, request = Host(), asked(list(range(16)))
    host.keep(request, 16)
    host.take()
    host.cache.flush()
    events = host.take()
    assert {event.kind for event in events} == {"removed"} and not any(host.router.blocks.values())
    host.keep(request, 16)
    host.take()
    assert host.router.blocks == expected_of(host)


def expected_of(host: Host) -> Any:
    return expected(host.cache, host.groups)


def test_a_reader_that_came_too_late_is_told_what_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Cache.journal
    monkeypatch.setattr(Cache, "journal", lambda cache: usual(cache, most=3))
    host = Host()
    kept = [asked([user] * 16) for user in range(5)]
    host.keep(kept[0], 16)
    host.take()
    for request in kept[1:]:
        host.keep(request, 16)
    host.cache.evict({host.groups[1].name: 1})  # the oldest one
    kinds = {event.kind for event in host.take()}
    assert kinds == {"stored", "removed"}, "what was told before, and is there still, is not told again"
    assert sum(len(blocks) for blocks in host.router.blocks.values()) == 4 * 5


def test_extra_keys_and_adapters_are_in_the_events() -> None:
    image = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=6, length=4))
    adapter = SimpleNamespace(name="a", adapter_id=7)
    host, request = Host(), asked(list(range(16)), mm_features=[image], cache_salt="pepper", lora_request=adapter)
    host.keep(request, 16)
    (pages, states) = host.take()
    assert pages.extra_keys == [("pepper",), (("image", 2),), (("image", -2),), None]
    assert states.extra_keys is None
    assert (pages.lora_id, pages.lora_name, pages.medium) == (7, "a", "CPU")


def test_what_nobody_has_named_is_not_told() -> None:
    host = Host()
    host.keep(asked(list(range(16))), 16, name=False)
    assert host.take() == []


@pytest.mark.parametrize(
    ("kind", "name", "mistake"),
    [
        (HostEvents, "_has", lambda self, group, page: (1 << 8 // group.tokens) - 1),
        (HostEvents, "_give_names", lambda self: None),
        (ResumablePages, "_regap", lambda self, node, seen: None),
        (ResumablePages, "_judge", lambda self, node: self._mark(node, 1)),
    ],
)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, name: str, mistake: Any) -> None:
    monkeypatch.setattr(kind, name, mistake)
    with pytest.raises((AssertionError, AttributeError, IndexError)):
        run("full, state", "mistake", 400, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
@pytest.mark.filterwarnings("ignore")
def test_vllms_own_requests_and_events_say_the_same() -> None:
    """Its requests name the blocks, its classes carry them, and its own decoder reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import msgspec
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from prefixloom_vllm.connector import extra_keys_of
    init_none_hash(sha256)
    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, 0)
    request = Request(
        request_id="a", prompt_token_ids=list(range(16)), sampling_params=params, pooling_params=None,
        cache_salt="pepper", block_hasher=get_request_block_hasher(4, sha256),
    )  # fmt: skip
    host = Host()
    made = form(host.groups)
    kinds = {0: ("full_attention", None), 1: ("mamba", None)}
    host.events = HostEvents(
        host.groups, host.cache, type(made)(BlockStored, BlockRemoved, made.written, extra_keys_of, kinds, 4)
    )
    host.keep(request, 16)
    batch = msgspec.msgpack.decode(
        msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=host.events.take())), type=KVEventBatch
    )
    pages, states = batch.events
    assert pages.block_hashes == request.block_hashes and len(pages.block_hashes) == 4
    assert pages.extra_keys[0] == ("pepper",) or list(pages.extra_keys[0]) == ["pepper"]
    assert (pages.kv_cache_spec_kind, states.kv_cache_spec_kind) == ("full_attention", "mamba")
    host.cache.flush()
    assert all(isinstance(event, BlockRemoved) and event.medium == "CPU" for event in host.events.take())
