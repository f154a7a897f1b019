"""Peers beside ours: the same service, the same bytes, one reason for each token, and refusals before anybody waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest

from bench.engines.sglang_sizes import SGLangOptions, sglang_sizes
from bench.engines.vllm_sizes import vllm_sizes
from prefixloom import compose
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.errors import CapacityError, InputError
from prefixloom.keys.tokens import Tokens
from prefixloom.lab import BlockPrompt, LabRequest, Replay, ReplayOutcome, Service, Setup, read_trace
from prefixloom.lab.beside.peer import (
    MemoryKind,
    NotSized,
    PeerCache,
    PeerFull,
    PeerMatch,
    PeerUnavailable,
    find_peer,
    memory_kinds,
)
from prefixloom.lab.beside.peer_replay import PeerReplay
from prefixloom.lab.beside.side_by_side import best, computed_by_reason, differences, explanation, table
from prefixloom.lab.beside.sides import check_beside, replay_beside
from prefixloom.lab.replay import PoolFigures, PoolRoom

CONFIGS = Path(__file__).parents[1] / "configs"
GIB = 1 << 30
PEERS = {"vllm": "bench.engines.vllm_lab:VLLMBeside", "sglang": "bench.engines.sglang_lab:SGLangBeside"}
LLAMA = {
    "model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 16,
}  # fmt: skip
SERVICE = Service(prefill=20_000, decode=100, max_running=8, chunk=256)
QWEN = [MemoryKind("full", "path", 12, 2048), MemoryKind("mamba", "state", 36, 1_097_728)]
GPT_OSS = [MemoryKind("full", "path", 18, 2048), MemoryKind("swa", "window", 18, 2048, 128)]
GEMMA = [MemoryKind("full", "path", 4, 4096), MemoryKind("swa", "window", 22, 4096, 4096)]


def conversations(count: int) -> list[LabRequest]:
    """Turns of some conversations that begin alike, so many at once that pools of a few thousand tokens are short."""
    made = []
    for number in range(count):
        talk, turn = number % 7, number // 7
        ids = [0, 1, *(100 * (talk + 1) + step for step in range(3 * (turn % 6) + 2))]
        made.append(LabRequest(0.02 * number, BlockPrompt(ids, 64, 64 * len(ids) - 5, number), output=40))
    return made


class Opened:
    """A sequence of our cache, and who counts it."""

    def __init__(self, peer: OursAsPeer, sequence: Sequence) -> None:
        self.sequence, self._peer = sequence, peer
        peer.running += 1

    def close(self) -> None:
        self._peer.running -= 1
        self.sequence.close()

    def abort(self) -> None:
        self._peer.running -= 1
        self.sequence.abort()


class OursAsPeer(PeerCache):
    """Our own cache of full attention behind the verbs of a peer."""

    settings = {"default": "as it is"}

    def __init__(self, cache: Cache, chunk: int) -> None:
        self._cache, self._room = cache, PoolRoom(cache, chunk)
        self.running = 0
        self.grain = cache.composition.page
        self.sizing = ["as composed"]

    @classmethod
    def version(cls) -> str:
        return "ours"

    @classmethod
    def check_size(cls, kinds: Many[MemoryKind], memory: int, setting: str) -> None:
        pass

    def holds(self, length: int) -> bool:
        return self._room.holds(length)

    def open(self, tokens: Tokens, namespace: str, end: int) -> tuple[Any, PeerMatch]:
        plan = self._cache.match(tokens, namespace=namespace, leave=1)
        sequence = self._cache.open(plan)
        if self.running and not self._room.suffices(sequence.ready, end):
            sequence.abort()
            raise PeerFull("full", "no pages are left")
        return Opened(self, sequence), PeerMatch(plan.ready, plan.walked, plan.limited_by)

    def extend(self, request: Any, count: int) -> int:
        self.decode(request, count)
        request.sequence.publish()
        return count

    def decode(self, request: Any, count: int) -> None:
        request.sequence.grow(count)
        with self._cache.step((request.sequence,)) as step:
            step.run_ops()

    def pools(self) -> Mapping[str, PoolFigures]:
        return {
            name: PoolFigures(each.capacity, each.page_tokens, 1, each.cached, each.running, each.evicted)
            for name, each in self._cache.stats().components.items()
        }


def replayed_both(tokens: int, requests: list[LabRequest]) -> tuple[ReplayOutcome, ReplayOutcome]:
    def made() -> Cache:
        return compose(LLAMA, capacity=tokens, device="meta", max_running=SERVICE.max_running)

    ours = Replay(made(), service=SERVICE).run(requests)
    cache = made()
    peer = PeerReplay(OursAsPeer(cache, SERVICE.chunk), cache.composition, name="ours", service=SERVICE).run(requests)
    return ours, peer


@pytest.mark.parametrize("tokens", [1600, 4000, 100_000])
def test_our_cache_as_a_peer_measures_what_our_replay_measures(tokens: int) -> None:
    ours, peer = replayed_both(tokens, conversations(150))
    for name in ("requests", "refused", "retracted", "prompt", "hit", "computed", "ideal", "missed", "left", "span"):
        assert getattr(peer, name) == getattr(ours, name), name
    assert [use.evicted for use in peer.components.values()] == [use.evicted for use in ours.components.values()]
    assert tokens > 50_000 or ours.computed > ours.ideal  # it was short of room


def test_the_reasons_add_up_to_what_was_computed() -> None:
    large, small = replayed_both(100_000, conversations(100))[0], replayed_both(1600, conversations(100))[1]
    assert small.retracted
    for each in (large, small):
        assert sum(computed_by_reason(each).values()) == each.computed
    assert sum(differences(large, small).values()) == small.computed - large.computed > 0
    said = explanation(large, small)
    assert f"{small.computed - large.computed:+,} tokens = " in said
    assert "had been evicted" in said and "given up their room" in said
    assert explanation(large, large) == f"{large.policy}: no difference"


def test_a_hit_that_ends_on_a_coarse_grain_misses_the_rest_as_rounded() -> None:
    class Coarse(OursAsPeer):
        def open(self, tokens: Tokens, namespace: str, end: int) -> tuple[Any, PeerMatch]:
            cut = self._cache.match(tokens, leave=1).ready // 96 * 96
            plan = self._cache.match(tokens.part(0, cut + 1), leave=1)
            sequence = self._cache.open(plan)
            sequence.append(tokens.part(cut + 1))
            return Opened(self, sequence), PeerMatch(plan.ready, plan.walked, None)

    cache = compose(LLAMA, capacity=100_000, device="meta", max_running=8)
    peer = Coarse(cache, 256)
    peer.grain = 96
    requests = conversations(60)
    outcome = PeerReplay(peer, cache.composition, name="coarse", service=SERVICE).run(requests)
    fine = Replay(compose(LLAMA, capacity=100_000, device="meta"), service=SERVICE).run(requests)
    assert outcome.missed["rounded"] == outcome.computed - fine.computed > 0
    assert "gone" not in outcome.missed
    assert "lie behind the last place where a hit may end" in explanation(fine, outcome)


def test_sums_of_other_requests_are_not_compared() -> None:
    ours, less = replayed_both(100_000, conversations(20))[0], replayed_both(100_000, conversations(15))[0]
    assert "not of the same requests" in explanation(ours, less)


def test_the_table_has_a_row_for_each_side_and_a_star_for_the_best() -> None:
    ours, peer = replayed_both(100_000, conversations(60))
    worse = replayed_both(1600, conversations(60))[1]
    assert best([worse, peer]) is peer
    told = "\n".join(table([ours], {"ours": [worse, peer]}))
    assert "ideal (infinite memory)" in told and "prefixloom, lru" in told
    assert told.count(" *") == 1 and "as composed" in told


# ---------------------------------------------------------------- sizes


def test_a_block_of_vllm_grows_to_the_bytes_of_a_state() -> None:
    sizes = vllm_sizes(QWEN, 40 * GIB)
    assert sizes.page == 544  # what vLLM says for Qwen3-Next with states in bfloat16
    assert [each.name for each in sizes.groups] == ["full", "mamba", "mamba", "mamba"]
    assert sizes.page_bytes == 544 * 2048 >= 1_097_728
    assert any("padded by 1.5%" in each for each in sizes.sentences)


def test_layers_of_vllm_are_divided_into_groups_of_one_size() -> None:
    assert [each.name for each in vllm_sizes(GPT_OSS, GIB).groups] == ["full", "swa"]
    gemma = vllm_sizes(GEMMA, GIB)
    assert gemma.group_layers == 4 and len(gemma.groups) == 1 + 6  # 22 layers of windows in groups of 4
    assert any("2 places for layers are empty" in each for each in gemma.sentences)
    near = vllm_sizes([MemoryKind("full", "path", 13, 2048), MemoryKind("swa", "window", 12, 2048, 128)], GIB)
    assert near.group_layers == 13 and len(near.groups) == 2  # 12 and 13 layers: not one group of 12 and one of 1


@pytest.mark.parametrize("kinds", [QWEN, GPT_OSS, GEMMA, GPT_OSS[:1]])
@pytest.mark.parametrize("memory", [8 * GIB, 40 * GIB + 12345])
def test_no_side_takes_more_bytes_than_it_is_given(kinds: list[MemoryKind], memory: int) -> None:
    blocks = vllm_sizes(kinds, memory)
    assert memory - blocks.block_bytes < blocks.blocks * blocks.block_bytes <= memory
    size = {each.kind: each.bytes for each in kinds}
    for options in (SGLangOptions(), SGLangOptions(page=64, windows=0.2, states=0.3)):
        pools = sglang_sizes(kinds, memory, options)
        padding = 1 if pools.states else 0
        taken = pools.tokens * size["path"] + pools.window_tokens * size.get("window", 0)
        taken += (pools.states + padding) * size.get("state", 0)
        assert taken <= memory < taken + 65 * (size["path"] + size.get("window", 0))


def test_the_ratios_of_sglang_divide_its_bytes() -> None:
    windows = sglang_sizes(GPT_OSS, 8 * GIB, SGLangOptions())
    assert windows.window_tokens == int(0.8 * windows.tokens)
    state = QWEN[1].bytes
    states = sglang_sizes(QWEN, 40 * GIB, SGLangOptions())
    assert states.states == (int(40 * GIB * 0.9 / 1.9) - state) // state  # one is for padding
    assert sglang_sizes(QWEN, 40 * GIB, SGLangOptions(states=3.6)).tokens < states.tokens


def test_what_a_peer_cannot_be_sized_for_is_refused() -> None:
    with pytest.raises(NotSized, match="less than two blocks"):
        vllm_sizes(QWEN, 1000)
    with pytest.raises(NotSized, match="each attention layer takes the same bytes"):
        vllm_sizes([GPT_OSS[0], GEMMA[1]], GIB)
    with pytest.raises(NotSized, match="one request counts for 5"):
        sglang_sizes(QWEN, QWEN[1].bytes * 3, SGLangOptions())
    with pytest.raises(NotSized, match="fewer than one window"):
        sglang_sizes(GEMMA, 1 << 30, SGLangOptions(windows=0.01))
    with pytest.raises(NotSized, match="at most one window"):
        sglang_sizes(GPT_OSS[1:], GIB, SGLangOptions())


def test_the_kinds_of_memory_follow_from_the_manifests() -> None:
    kinds = memory_kinds(Setup(CONFIGS / "gpt_oss.json", memory="20GiB").compose().composition)
    assert {(each.name, each.kind, each.layers, each.entry_bytes, each.window) for each in kinds} == {
        ("full", "path", 18, 2048, 0), ("swa", "window", 18, 2048, 128),
    }  # fmt: skip
    with pytest.raises(InputError, match="cannot be given to a peer"):
        memory_kinds(Setup(CONFIGS / "llama4.json", memory="400GiB").compose().composition)


# ---------------------------------------------------------------- refusals


def test_a_peer_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="No module named 'nobody'"):
        find_peer("nobody")
    with pytest.raises(InputError, match="no class of PeerCache"):
        find_peer("json:loads")
    with pytest.raises(InputError, match="No module named 'no_such_module'"):
        find_peer("no_such_module:Peer")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_peer_whose_engine_cannot_be_imported_says_how_to_get_it(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, engine, None)
    for name in (f"bench.engines.{engine}", f"bench.engines.{engine}_lab"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    with pytest.raises(PeerUnavailable) as told:
        find_peer(PEERS[engine])
    assert f"pip install --no-deps {engine}==" in str(told.value) and "docs/peers.md" in str(told.value)
    assert "\n" not in str(told.value)


def test_what_the_drivers_do_not_know_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for more, said in (
        ({"service": None}, "--in-turn"), ({"outputs": "published"}, "--outputs"), ({"host": "1GiB"}, "--host"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            check_beside(Setup(LLAMA, memory="1GiB", **more))


# ---------------------------------------------------------------- real peers, where they are installed


def peer_of(engine: str) -> type[PeerCache]:
    try:
        return find_peer(PEERS[engine])
    except PeerUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model", ["llama", "gpt_oss", "qwen3_next"])
def test_a_real_peer_serves_all_requests_and_every_token_has_a_reason(engine: str, model: str, tmp_path: Path) -> None:
    peer = peer_of(engine)
    lines = [
        {
            "timestamp": int(1000 * each.at), "input_length": each.prompt.count, "output_length": each.output,
            "hash_ids": list(each.prompt.ids) if isinstance(each.prompt, BlockPrompt) else [],
        }
        for each in conversations(80)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(path)
    setup = Setup(
        LLAMA if model == "llama" else CONFIGS / f"{model}.json",
        memory="64MiB" if model == "llama" else "24GiB",
        service=SERVICE,
    )
    ours = setup.replay(trace)
    name = f"{peer.__module__}:{peer.__name__}"
    for outcome in replay_beside(setup, trace, name):
        assert outcome.requests == 80 and not outcome.refused, outcome.policy
        assert sum(computed_by_reason(outcome).values()) == outcome.computed
        assert outcome.bytes <= 24 * GIB
        if model == "llama" and "drafts" not in outcome.policy and "64" not in outcome.policy:
            assert outcome.computed <= ours.computed  # all fits: only the last page may differ
        assert "tokens = " in explanation(ours, outcome) or "no difference" in explanation(ours, outcome)


def test_running_out_of_room_in_a_peer_is_a_capacity_error() -> None:
    assert isinstance(PeerFull("full", "no pages are left"), CapacityError)
    assert str(PeerFull("full", "no pages are left")) == "full: no pages are left"
