"""The scheduler's side beside workers that do as they are told, without vLLM: which block lies in which slot, and when.

Requests, groups and blocks are plain stand-ins for vLLM's. The region is the real one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixloom import CompositionError, Identity, ProtocolError, StorageError
from prefixloom_vllm.books import Books, check_identity, size
from prefixloom_vllm.figures import MISSED, Figures
from prefixloom_vllm.groups import Group, groups_of
from prefixloom_vllm.options import Options
from prefixloom_vllm.region import Region
from prefixloom_vllm.scheduler import Copy, Plan, SchedulerSide
from prefixloom_vllm.worker import Copier, WorkerSide
from tests.support.store_servers import redis, redis_url
from tests.support.vllm_specs import FULL, STATE, WINDOW, config, spec


class Engine:
    """vLLM's scheduler and one worker, as far as this side knows them. ``memory``: what each block and slot has."""

    def __init__(self, folder: Path, *specs: Any, **options: Any) -> None:
        self.groups: list[Group] = groups_of(config(*specs))
        self.options = Options.of({"blocks": 16 * len(self.groups), **options})
        count = size(self.groups, self.options, 1)
        self.worker = Region(str(folder), "engine", self.groups, count, 1, 0)
        self.region = Region(str(folder), "engine", self.groups, count, 1, None)
        identity = Identity(model="m", weights="w")
        self.books = Books(self.groups, self.options, 1, self.region, identity, True)
        self.side = SchedulerSide(self.groups, self.books, self.region, Figures())
        self.blocks: dict[tuple[int, int], Any] = {}
        self.slots: dict[tuple[int, int], Any] = {}
        self.seen: list[Copy] = []
        self._block = 0

    def new_blocks(self, count: int) -> list[list[int]]:
        """Block numbers of every group, for so many tokens."""
        tables = []
        for _ in self.groups:
            tables.append(list(range(self._block + 1, self._block + 1 + count // 4)))
            self._block += count // 4
        return tables

    def work(self, plan: Plan, ok: bool = True, finish: bool = True) -> None:
        self.seen += [*plan.loads, *plan.stores]
        for copies, to_host in ((plan.loads, False), (plan.stores, True)):
            for copy in copies:
                for group, (blocks, slots) in copy.pairs.items():
                    for block, slot in zip(blocks, slots, strict=True):
                        if to_host:
                            self.slots[group, slot] = self.blocks[group, block]
                        elif ok:
                            self.blocks[group, block] = self.slots[group, slot]
                if finish:
                    self.worker.finish(copy.number, ok)

    def step(self, request: Any, tables: list[list[int]], count: int, **how: Any) -> Plan:
        """Compute ``count`` tokens of a request, and offer the state where they end at a boundary."""
        begin = request.num_computed_tokens
        end = begin + count
        for group, table in zip(self.groups, tables, strict=True):
            for at in range(begin // 4, -(-end // 4)):
                self.blocks[group.index, table[at]] = (at, tuple(request.all_token_ids[: (at + 1) * 4]))
        offered = [(g.index, tables[g.index][end // 4 - 1], end) for g in self.groups if g.is_state and not end % 4]
        offered = how.pop("offers", offered)
        state = SimpleNamespace(
            boundary_state_offloads={request.request_id: offered}, resolve_block_ids=lambda name: tables
        )
        plan = self.side.plan({request.request_id: count}, state, how.pop("new", ()))
        self.work(plan, **how)
        request.num_computed_tokens = end
        self.side.settle()
        self.side.check()
        return plan

    def hit(self, request: Any, computed: int = 0) -> int:
        """What the host has of a request, asked again until a store has answered."""
        found = None
        while found is None:
            found = self.side.hit(request, computed)
            self.side.check()
        return found

    def load(self, request: Any, count: int, computed: int = 0, **how: Any) -> list[list[int]]:
        """Let a request load what was promised. The first blocks of windows and states are not given, as in vLLM."""
        tables = self.new_blocks(computed + count)
        given = []
        for group, table in zip(self.groups, tables, strict=True):
            needed = {b for lo, hi in group.reach.needs(computed + count) for b in range(lo // 4, -(-hi // 4))}
            needed |= {(computed + count) // 4 - 1} if group.is_state else set()
            given.append([SimpleNamespace(block_id=b, is_null=at not in needed) for at, b in enumerate(table)])
        self.side.allocated(request, given, count)
        self.work(self.side.plan({}, None, ()), **how)
        self.side.settle()
        self.side.check()
        return tables

    def close(self) -> None:
        self.books.close()
        self.region.close()
        self.worker.close()


def request(name: str, tokens: list[int], **fields: Any) -> Any:
    plain = {"prompt_embeds": None, "resumable": False, "lora_request": None, "cache_salt": None, "mm_features": []}
    return SimpleNamespace(
        request_id=name, all_token_ids=tokens, num_tokens=len(tokens), num_computed_tokens=0, num_preemptions=0,
        skip_reading_prefix_cache=False, **{**plain, **fields},
    )  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def engine(*specs: Any, **options: Any) -> Engine:
        made.append(Engine(tmp_path, *specs, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def serve(engine: Engine, name: str, tokens: list[int], chunk: int = 8, **fields: Any) -> None:
    """A request that hits nothing, from its beginning to its end."""
    mine = request(name, tokens, **fields)
    assert engine.hit(mine) == 0
    tables = engine.new_blocks(len(tokens) // 4 * 4 + 4)
    while mine.num_computed_tokens < len(tokens):
        engine.step(mine, tables, min(chunk, len(tokens) - mine.num_computed_tokens))
    engine.side.finished(mine)


KINDS = [(FULL,), (FULL, WINDOW), (FULL, STATE), (WINDOW, FULL, STATE)]


@pytest.mark.parametrize("specs", KINDS)
def test_a_second_request_loads_what_the_first_computed(make: Any, specs: Any) -> None:
    engine = make(*specs)
    serve(engine, "a", list(range(26)))
    again = request("b", [*range(24), 7, 7])
    assert engine.hit(again) == 24
    tables = engine.load(again, 24)
    for group, table in zip(engine.groups, tables, strict=True):
        wanted = [5] if group.is_state else [b for lo, hi in group.reach.needs(24) for b in range(lo // 4, hi // 4)]
        for at in wanted:
            assert engine.blocks[group.index, table[at]] == (at, tuple(range((at + 1) * 4)))
    engine.side.finished(again)
    assert not engine.side.tracked and not engine.side.busy


def test_what_the_device_has_already_is_not_loaded(make: Any) -> None:
    engine = make(FULL)
    serve(engine, "a", list(range(26)))
    assert engine.hit(request("b", list(range(26))), computed=16) == 8
    assert engine.hit(request("c", list(range(26))), computed=24) == 0


@pytest.mark.parametrize("field", [{"cache_salt": "x"}, {"mm_features": [
    SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=2, length=4))
]}])  # fmt: skip
def test_salts_and_images_keep_equal_tokens_apart(make: Any, field: Any) -> None:
    engine = make(FULL)
    serve(engine, "a", list(range(26)), **field)
    assert engine.hit(request("b", list(range(26)))) == 0
    assert engine.hit(request("c", list(range(26)), **field)) == 24


def test_a_block_that_is_copied_is_finished_before_it_is_written_again(make: Any) -> None:
    engine = make(FULL)
    mine = request("a", list(range(9)))
    engine.hit(mine)
    tables = engine.new_blocks(12)
    (copy,) = engine.step(mine, tables, 8, finish=False).stores
    engine.side.finished(mine)
    plan = engine.side.plan({}, None, [tables[0][1]])
    assert plan.wait_for == (copy.number,)
    engine.worker.finish(copy.number, True)
    engine.side.settle()
    assert engine.side.plan({}, None, [tables[0][1]]).wait_for == ()


def test_a_failed_load_is_not_tried_again(make: Any) -> None:
    engine = make(FULL, WINDOW)
    serve(engine, "a", list(range(26)))
    again = request("b", list(range(26)))
    assert engine.hit(again) == 24
    engine.load(again, 24, ok=False)
    assert engine.hit(again) == 0
    assert engine.side.figures.total["failed_loads"] == 1


def test_a_failed_store_is_not_found_and_its_slots_come_back(make: Any) -> None:
    engine = make(FULL)
    mine = request("a", list(range(9)))
    engine.hit(mine)
    engine.step(mine, engine.new_blocks(12), 8, ok=False)
    engine.side.finished(mine)
    assert engine.hit(request("b", list(range(9)))) == 0
    assert len(engine.books.free) == 16


def test_a_state_that_is_offered_a_step_after_its_pages_is_kept(make: Any) -> None:
    engine = make(FULL, STATE)
    mine = request("a", list(range(9)))
    assert engine.hit(mine) == 0
    tables = engine.new_blocks(12)
    engine.step(mine, tables, 8, offers=())  # as where vLLM does not know yet which token stands there
    engine.step(mine, tables, 1, offers=[(1, tables[1][1], 8)])
    engine.side.finished(mine)
    again = request("b", list(range(9)))
    assert engine.hit(again) == 8
    engine.load(again, 8)


def test_pages_without_a_state_are_sent_once(make: Any) -> None:
    engine = make(FULL, STATE)
    mine = request("a", list(range(26)))
    engine.hit(mine)
    tables = engine.new_blocks(28)
    sent = []
    for _ in range(6):
        for copy in engine.step(mine, tables, 4, offers=()).stores:
            sent += copy.pairs[0][0]
    assert sent == tables[0][:6]


def test_of_states_those_are_kept_at_which_all_groups_have_whole_blocks(make: Any) -> None:
    wide = spec("FullAttentionSpec", block_size=8, unpadded_page_size_bytes=16)
    engine = make(wide, spec("MambaSpec", mamba_cache_mode="all", unpadded_page_size_bytes=16))
    mine = request("a", list(range(33)))
    assert engine.hit(mine) == 0
    tables = engine.new_blocks(36)
    engine.step(mine, tables, 32, offers=())
    (copy,) = engine.seen
    assert copy.pairs[0][0] == tables[0][:4] and copy.pairs[1][0] == tables[1][1:8:2]


def test_an_id_that_comes_again_is_another_request(make: Any) -> None:
    engine = make(FULL)
    first = request("a", list(range(9)))
    engine.hit(first)
    (copy,) = engine.step(first, engine.new_blocks(12), 8, finish=False).stores
    engine.side.finished(first)
    second = request("a", list(range(50, 59)))
    engine.hit(second)
    tables = engine.new_blocks(12)
    engine.step(second, tables, 8, finish=False)
    engine.worker.finish(copy.number, True)
    engine.worker.finish(engine.seen[-1].number, True)
    engine.side.settle()
    assert engine.hit(request("b", list(range(50, 59)))) == 8
    assert engine.hit(request("c", list(range(9)))) == 8


@pytest.mark.parametrize("odd", ["prompt_embeds", "resumable"])
def test_an_id_that_comes_again_for_what_is_not_kept_is_another_request(make: Any, odd: str) -> None:
    """Copies of the first go on. Nothing of the second may be kept under the tokens of the first."""
    engine = make(FULL, STATE)
    first = request("a", list(range(16)))
    engine.hit(first)
    engine.step(first, engine.new_blocks(16), 8, finish=False)
    engine.side.finished(first)
    second = request("a", [*range(12), 7, 7, 7, 7], **{odd: True})
    assert engine.hit(second) == 0
    engine.side.allocated(second, [], 0)
    plan = engine.step(second, engine.new_blocks(16), 16)
    assert not plan.stores, "nothing of such a request is kept"


def test_a_request_of_which_nothing_is_kept_does_not_stand_in_the_way_of_the_next(make: Any) -> None:
    engine = make(FULL)
    odd, plain = request("odd", list(range(8)), resumable=True), request("plain", list(range(8)))
    for each in (odd, plain):
        assert engine.hit(each) == 0
    tables = engine.new_blocks(8)
    blocks = SimpleNamespace(boundary_state_offloads={}, resolve_block_ids=lambda name: tables)
    (copy,) = engine.side.plan({"odd": 8, "plain": 8}, blocks, ()).stores
    assert copy.pairs[0][0] == tables[0]


def test_a_load_that_lasts_keeps_its_place_in_the_table_of_copies(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("region", "scheduler"):
        monkeypatch.setattr(f"prefixloom_vllm.{module}.RING", 8)
    engine = make(FULL)
    serve(engine, "a", list(range(26)))
    slow = request("slow", list(range(26)))
    assert engine.hit(slow) == 24
    engine.load(slow, 24, finish=False)
    number, before = engine.seen[-1].number, len(engine.seen)
    for user in range(10):
        serve(engine, f"{user}", [user] * 9)
    assert number % 8 not in {copy.number % 8 for copy in engine.seen[before:]}
    assert engine.side.busy
    engine.worker.finish(number, True)
    engine.side.settle()
    assert not engine.side.busy


def test_a_load_of_another_length_than_was_promised_is_refused(make: Any) -> None:
    engine = make(FULL)
    serve(engine, "a", list(range(26)))
    again = request("b", list(range(26)))
    assert engine.hit(again) == 24
    with pytest.raises(ProtocolError, match="vLLM loads 20 tokens for b, and 24 were promised"):
        engine.load(again, 20)


def test_what_a_load_reads_is_not_given_away_by_a_reset(make: Any) -> None:
    engine = make(FULL)
    serve(engine, "a", list(range(26)))
    again = request("b", list(range(26)))
    assert engine.hit(again) == 24
    engine.load(again, 24, finish=False)
    engine.side.reset()
    engine.side.check()
    assert len(engine.books.free) == 16 - 6
    engine.worker.finish(engine.seen[-1].number, True)
    engine.side.settle()
    assert len(engine.books.free) == 16
    assert engine.hit(request("c", list(range(26)))) == 0


def test_the_oldest_goes_when_the_host_is_full(make: Any) -> None:
    engine = make(FULL, WINDOW)
    for user in range(5):
        serve(engine, f"{user}", [user] * 26)
    assert [engine.hit(request(f"x{user}", [user] * 26)) for user in range(5)][-2:] == [24, 24]
    assert engine.hit(request("y0", [0] * 26)) == 0


def test_beside_requests_that_wait_for_a_load_there_is_room_for_others(make: Any) -> None:
    """What no boundary needs goes first, and then the ends of paths: there is enough of both for a third prompt."""
    engine = make(FULL, WINDOW)
    for user in range(3):
        serve(engine, f"{user}", [user] * 26)
        waiting = [engine.hit(request(f"x{user} {each}", [each] * 26)) for each in range(user + 1)]
        assert waiting == [24] * (user + 1)


def test_a_store_survives_its_process_and_is_refused_to_another_model(make: Any, tmp_path: Path) -> None:
    store = {"store": str(tmp_path / "store"), "store_capacity": "16MiB", "staging": "1MiB", "fetch": "wait"}
    engine = make(FULL, STATE, **store)
    serve(engine, "a", list(range(26)))
    engine.close()
    engine = make(FULL, STATE, **store)
    again = request("b", list(range(26)))
    assert engine.hit(again) == 24
    assert engine.side.figures.total["fetched_tokens"] == 24
    engine.side.reset()
    last = request("c", list(range(26)))
    assert engine.hit(last) == 0, "what was stored before a reset is of other weights"
    engine.close()
    with pytest.raises(StorageError, match="belongs to another model: weights is 'w' there and 'v' here"):
        check_identity(tmp_path / "store", Identity(model="m", weights="v"))


@pytest.mark.outside("redis-server")
def test_engines_share_the_store_of_a_server(make: Any, tmp_path: Path) -> None:
    store = {"store": redis_url(redis(), prefix=f"vllm-{os.getpid()}"), "staging": "1MiB", "fetch": "wait"}
    one = make(FULL, STATE, **store)
    (tmp_path / "second").mkdir()
    other = Engine(tmp_path / "second", FULL, STATE, **store)
    serve(one, "a", list(range(26)))
    one.books.close()  # until the store has all of it
    assert other.hit(request("b", list(range(26)))) == 24
    assert other.side.figures.total["fetched_tokens"] == 24
    other.close()


def test_two_engines_cannot_have_one_store(make: Any, tmp_path: Path) -> None:
    store = {"store": str(tmp_path / "store"), "store_capacity": "16MiB", "staging": "1MiB"}
    first = make(FULL, **store)
    second = tmp_path / "second"
    second.mkdir()
    with pytest.raises(StorageError, match=r"cannot be used: .* has a writer already"):
        Engine(second, FULL, **store)
    serve(first, "a", list(range(26)))
    assert first.hit(request("b", list(range(26)))) == 24


def test_two_engines_of_one_name_are_refused(make: Any, tmp_path: Path) -> None:
    groups = groups_of(config(FULL))
    Region(str(tmp_path), "engine", groups, 8, 2, 0)  # rank 1 has not mapped it yet
    with pytest.raises(StorageError, match="another engine on this machine has the engine_id 'engine'"):
        Region(str(tmp_path), "engine", groups, 8, 2, 0)


def test_a_worker_that_is_shut_down_ends_its_copies_first(tmp_path: Path) -> None:
    groups = groups_of(config(FULL))
    regions = [Region(str(tmp_path), "engine", groups, 64, 1, rank) for rank in (0, None)]
    worker = WorkerSide(groups, regions[0], Figures(), True)
    memory = torch.arange(64 * 8, dtype=torch.int64).to(torch.uint8).view(64, 8)
    worker.register({"0.0": memory, "0.1": memory + 1}, 64)
    copies = [Copy(number, "a", {0: ([number], [64 - number])}) for number in range(1, 60)]
    worker.store(Plan(stores=tuple(copies)))
    worker.close()
    assert all(regions[1].finished(copy.number) for copy in copies)
    first, second = regions[1].layers(0, 0)
    for copy in copies:
        slot = 64 - copy.number
        assert torch.equal(first[slot], memory[copy.number]) and torch.equal(second[slot], memory[copy.number] + 1)
    for region in regions:
        region.close()
    assert not list(tmp_path.glob("prefixloom-vllm-*"))


def test_a_copy_that_fails_on_a_stream_is_over_when_the_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    stream = SimpleNamespace(wait_event=lambda _: said.append("waits"), synchronize=lambda: said.append("is over"))
    event = SimpleNamespace(record=lambda *_: None, elapsed_time=lambda _: 1.0)
    for name, stand_in in {
        "Stream": lambda _: stream, "Event": lambda **_: event, "set_device": lambda _: None,
        "current_stream": lambda _: None, "stream": lambda _: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    copier = Copier("loads", torch.device("cuda", 0))

    def fails() -> None:
        said.append("copies a group")
        raise RuntimeError("no memory for the next")

    def told(seconds: float | None) -> None:
        said.append(f"told {seconds}")
        raise OSError("the region is gone")

    for work in (fails, lambda: None):
        copier.run(1, work, told)
        copier.wait([1])
    copier.close()
    assert said == ["waits", "copies a group", "is over", "told None", "waits", "is over", "told 0.001"]


def test_memory_for_less_than_a_block_of_each_group_is_refused() -> None:
    groups = groups_of(config(FULL, WINDOW))
    with pytest.raises(CompositionError, match="memory is 31 bytes, and a block of each of the 2 groups takes 32"):
        size(groups, Options.of({"memory": 31}), 1)
    assert size(groups, Options.of({"memory": 33}), 1) == 2


def test_the_region_has_no_name_once_all_have_mapped_it(make: Any, tmp_path: Path) -> None:
    make(FULL)
    assert not list(tmp_path.glob("prefixloom-vllm-*"))


def test_what_a_dead_engine_left_is_swept(make: Any, tmp_path: Path) -> None:
    left = tmp_path / f"prefixloom-vllm-{os.getuid()}-dead"
    left.write_bytes(bytes(64))
    make(FULL)
    assert not left.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "say how much of the host"),
        ({"memory": 0}, "memory must be positive, got 0 bytes"),
        ({"blocks": 0}, "blocks is a whole number of at least 1"),
        ({"memory": "4GiB", "blocks": 4}, "say how much of the host"),
        ({"memory": "4GiB", "memroy": 1}, "did you mean 'memory'"),
        ({"memory": "4GiB", "store": "x"}, "a store needs store_capacity"),
        ({"memory": "4GiB", "store": "redis://h:1/0", "store_capacity": 9}, "a URL says all of its store"),
        ({"memory": "4GiB", "staging": 5}, "no store was given"),
        ({"memory": "4GiB", "fetch": "never"}, "fetch is 'best_effort'"),
    ],
)
def test_wrong_options_are_refused_in_words(options: Any, says: str) -> None:
    with pytest.raises(CompositionError, match=says):
        Options.of(options)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (config(spec("RSWASpec")), "layers of RSWASpec, and this connector knows"),
        (config(FULL, is_eagle_group=True), "layers of a draft model"),
        (config(spec("MambaSpec", mamba_cache_mode="none")), "switch prefix caching on"),
        (config(FULL, host_resident=True), "takes no part in prefix caching"),
        (config(), "nothing to cache"),
    ],
)
def test_models_that_cannot_be_served_are_refused_in_words(group: Any, says: str) -> None:
    with pytest.raises(CompositionError, match=says):
        groups_of(group)


def test_why_prompts_missed_is_counted_by_component_and_reason(make: Any) -> None:
    engine = make(FULL, WINDOW)
    engine.side.figures.take()
    for user in range(5):
        serve(engine, f"{user}", [user] * 26)
    engine.side.figures.take()
    engine.hit(request("again", [0] * 26))
    engine.hit(request("fresh", [9] * 26))
    counts = {name: count for name, count in engine.side.figures.take().items() if name.startswith(MISSED)}
    assert sum(counts.values()) == 52
    by_reason = {tuple(name.split("|")[1:]): count for name, count in counts.items()}
    assert by_reason["", "", "new"] == 24
    assert [key for key in by_reason if key[2] == "evicted"] == [(engine.books.groups[0].name, "device", "evicted")]
