"""What the host announces as KV events, without vLLM: random traffic beside an oracle, and single cases.

With vLLM installed, its own classes of requests, hashes and events are used as well.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from prefixloom import Buffer, Cache, Component, Identity, Manifest, Window, compose, encode
from prefixloom_resumable import Holder, ResumablePages
from prefixloom_vllm.events import MOST_NAMINGS, Form, HostEvents
from prefixloom_vllm.groups import Group, groups_of, tree_page
from tests.random.vllm_events import HostRouter, block_hashes, expected, form
from tests.random.vllm_traffic import run
from tests.support.vllm_specs import FULL, STATE, WINDOW, config


class Host:
    """A host's books, which are filled by hand, and their events. Without ``specs``: of full attention and states."""

    def __init__(self, *specs: Any, debug: bool = True) -> None:
        self.groups: list[Group] = groups_of(config(*(specs or (FULL, STATE))))
        content = [Buffer("content", (), "int64")]
        self.cache: Cache = compose(
            None,
            plugins=[
                Component(
                    group.name,
                    Manifest(content, grid=group.tokens) if group.is_state
                    else Manifest(content, page_size=group.tokens),
                    group.reach,
                )
                for group in self.groups
            ],
            page_size=tree_page(self.groups),
            capacity={group.name: 16 if group.is_state else 128 for group in self.groups}, debug=debug,
        )  # fmt: skip
        self.form = form(self.groups)
        self.events = HostEvents(self.groups, self.cache, self.form)
        self.router = HostRouter(self.groups)

    def keep(self, request: Any, *stops: int, name: bool = True, salt: str = "") -> None:
        """Compute a prompt in chunks that end at ``stops``."""
        tokens = request.all_token_ids
        with self.cache.open(tokens, namespace=salt) as sequence:
            for stop in stops:
                sequence.grow(max(0, stop - sequence.reserved))
                with self.cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
        if name:
            self.events.name(request, salt, encode(tokens))

    def take(self) -> list[Any]:
        events = self.events.take()
        self.router.apply(events)
        return events

    def check(self) -> None:
        """The router has what the oracle says."""
        assert self.router.blocks == expected(self.cache, self.groups)


def asked(tokens: list[int], **fields: Any) -> Any:
    plain = {"lora_request": None, "mm_features": [], "cache_salt": None, **fields}
    return SimpleNamespace(all_token_ids=tokens, block_hashes=block_hashes(tokens, 4, None, None, ()), **plain)


def test_blocks_of_full_attention_are_announced_while_a_state_lies_at_or_below_them() -> None:
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


def test_a_path_that_goes_on_is_announced_below_what_was_announced_before() -> None:
    host, first, second = Host(), asked(list(range(8))), asked(list(range(16)))
    host.keep(first, 8)
    host.take()
    host.keep(second, 16)
    announced = [event for event in host.take() if event.group_idx == 0]
    assert [(event.parent_block_hash, event.block_hashes) for event in announced] == [
        (first.block_hashes[1], second.block_hashes[2:])
    ]


def test_a_flush_announces_each_block_as_removed_and_what_comes_back_as_stored() -> None:
    host, request = Host(), asked(list(range(16)))
    host.keep(request, 16)
    host.take()
    host.cache.flush()
    events = host.take()
    assert {event.kind for event in events} == {"removed"} and not any(host.router.blocks.values())
    host.keep(request, 16)
    host.take()
    host.check()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything may be announced again at any time."""
    monkeypatch.setattr("prefixloom_resumable.announcements.ANEW_SHARE", 1e12)


def small_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Cache.journal
    monkeypatch.setattr(Cache, "journal", lambda cache: usual(cache, most=3))


def test_a_reader_that_came_too_late_is_announced_what_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    small_journal(monkeypatch)
    host = Host()
    kept = [asked([user] * 16) for user in range(5)]
    host.keep(kept[0], 16)
    host.take()
    for request in kept[1:]:
        host.keep(request, 16)
    host.cache.evict({host.groups[1].name: 1})  # the oldest one
    kinds = {event.kind for event in host.take()}
    assert kinds == {"stored", "removed"}, "what was announced before, and is there still, is not announced again"
    assert sum(len(blocks) for blocks in host.router.blocks.values()) == 4 * 5


@pytest.mark.parametrize("specs", [(STATE,), (WINDOW,), (WINDOW, STATE), (FULL, STATE), (FULL, WINDOW)])
def test_names_are_kept_when_everything_is_announced_again(
    monkeypatch: pytest.MonkeyPatch, specs: tuple[Any, ...]
) -> None:
    """Those of pages that have nothing cached, too: above a window or a state, without full attention."""
    small_journal(monkeypatch)
    host, request = Host(*specs), asked(list(range(40)))
    host.keep(request, 8, 40)
    host.take()
    host.cache.evict({group.name: 99 for group in host.groups if isinstance(group.reach, Window)})
    host.take()
    for user in range(50, 54):
        host.keep(asked([user] * 8), 8)
    host.take()  # everything anew
    host.check()
    host.cache.evict({group.name: 1 for group in host.groups if not group.reach.closed_upward})
    host.take()
    host.check()
    host.keep(request, 8, 40)
    host.keep(asked([*range(8), *range(70, 78)]), 8, 16)
    host.take()
    host.check()
    assert any(host.router.blocks.values())


def test_a_page_that_lost_its_blocks_meanwhile_is_announced_when_it_has_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_journal(monkeypatch)
    host, request = Host(FULL, STATE), asked(list(range(24)))
    host.keep(request, 8, 24)
    host.take()
    for user in range(50, 53):  # more than the journal keeps
        host.keep(asked([user] * 8), 8)
    with host.cache.open(range(24)):
        host.cache.evict({host.groups[1].name: 9})  # the one at 8
    host.take()
    host.check()
    host.keep(asked([*range(8), *range(70, 78)]), 8, 16)
    host.take()
    host.check()


def test_blocks_are_announced_when_they_are_named_however_late() -> None:
    host, request = Host(), asked(list(range(24)))
    host.keep(request, 8, name=False)
    assert host.take() == []
    host.keep(request, 16, 24)
    pages, *states = host.take()
    assert pages.block_hashes == request.block_hashes and pages.parent_block_hash is None
    assert [event.block_hashes for event in states] == [[request.block_hashes[at]] for at in (1, 3, 5)]
    host.check()
    other = asked([*range(8), *range(90, 106)])
    host.keep(other, 24, name=False)
    assert host.take() == [], "below a page that is announced, too"
    host.events.name(other, "", encode(other.all_token_ids))
    assert {event.kind for event in host.take()} == {"stored"}
    host.check()


def broken(*_: Any, **__: Any) -> Any:
    raise ValueError("the sink is broken")


HOOKS = {
    "stored": (Form, "stored"),
    "removed": (Form, "removed"),
    "written": (Form, "written"),
    "extra keys": (Form, "extra_keys"),
    "pages": (ResumablePages, "apply"),
    "paths": (ResumablePages, "path"),
    "contents": (Cache, "contents"),
}
"""Everything that the code for events calls: of the form of events, of the followed pages, and of the cache."""


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_event_code_stays_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    host = Host(debug=False)
    host.cache.identity = Identity(model="m")
    requests = [asked([user] * 16) for user in range(4)]
    host.keep(requests[0], 16)
    host.take()
    kind, name = HOOKS[hook]
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        if kind is Form:
            patch.setattr(host.events, "_form", attrs.evolve(host.form, **{name: broken}))
        else:
            patch.setattr(kind, name, broken)
        if hook == "contents":  # it is asked after another error
            with host.events.guard():
                broken()
        for request in requests[1:3]:
            host.keep(request, 16)
            host.cache.evict({host.groups[1].name: 1})
            host.take()
    assert host.events.failures
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.exc_info and "the sink is broken" in caplog.text
    has, right = host.router.blocks, expected(host.cache, host.groups)
    assert all(has[index].keys() <= right[index].keys() for index in has), "nothing is announced that is not there"
    for request in requests:
        host.keep(request, 16)
    host.take()
    host.check()
    failures = host.events.failures
    host.keep(asked([5] * 16), 16)
    assert {event.kind for event in host.take()} == {"stored"}, "and goes on as usual"
    assert host.events.failures == failures


def test_if_blocks_cannot_be_removed_everything_is_cleared() -> None:
    host = Host(debug=False)
    host.keep(asked([1] * 16), 16)
    host.take()
    host.events._form = attrs.evolve(host.form, removed=broken)
    host.cache.flush()
    assert [event.kind for event in host.take()] == ["cleared"] and not any(host.router.blocks.values())
    host.keep(asked([2] * 16), 16)
    host.events._form = host.form
    host.take()
    host.events._form = attrs.evolve(host.form, removed=broken, cleared=broken)
    host.cache.flush()
    assert host.take() == [] and any(host.router.blocks.values())
    host.events._form = host.form
    host.take()
    assert not any(host.router.blocks.values()), "what could not be withdrawn is withdrawn later"


def test_a_request_that_cannot_name_its_pages_holds_nobody_else_up() -> None:
    host = Host(debug=False)
    host.keep(asked([1] * 16), 16)
    host.take()
    host.keep(asked([2] * 16, lora_request="no adapter"), 16)
    host.keep(asked([3] * 16), 16)
    assert {event.kind for event in host.take()} == {"stored"} and host.events.failures == 1
    assert sum(len(blocks) for blocks in host.router.blocks.values()) == 2 * 5
    host.keep(asked([2] * 16), 16)
    host.take()
    host.check()


def test_only_so_many_requests_wait_until_somebody_looks() -> None:
    host, first, other = Host(), asked([1] * 16), asked([2] * 16)
    host.keep(first, 16)
    for _ in range(MOST_NAMINGS):
        host.events.name(other, "", encode(other.all_token_ids))
    assert host.take() == [], "the first one did not wait"
    host.keep(first, 16)
    host.take()
    host.check()


def test_extra_keys_and_adapters_are_in_the_events() -> None:
    image = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=6, length=4))
    adapter = SimpleNamespace(name="a", adapter_id=7)
    host, request = Host(), asked(list(range(16)), mm_features=[image], cache_salt="pepper", lora_request=adapter)
    host.keep(request, 16)
    (pages, states) = host.take()
    assert pages.extra_keys == [("pepper",), (("image", 2),), (("image", -2),), None]
    assert states.extra_keys is None
    assert (pages.lora_id, pages.lora_name, pages.medium) == (7, "a", "CPU")


def test_what_nobody_has_named_is_not_announced() -> None:
    host = Host()
    host.keep(asked(list(range(16))), 16, name=False)
    assert host.take() == []


@pytest.mark.parametrize(
    ("kind", "name", "mistake"),
    [
        (HostEvents, "_give_names", lambda self: {}),
        (Holder, "gap", lambda self, run, at, high: (high, high)),
        (ResumablePages, "_lead", lambda self, run: None),
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
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
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
        host.groups, host.cache,
        type(made)(BlockStored, BlockRemoved, AllBlocksCleared, made.written, extra_keys_of, kinds, 4),
    )  # fmt: skip
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
