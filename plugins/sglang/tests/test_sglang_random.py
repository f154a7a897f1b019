"""Random traffic through SGLang's scheduler calls and pools, with our cache in debug mode.

A model beside the cache knows what every slot must hold. It checks each pass: what the request reads is what its own
tokens say, in full attention, in its window and in its state. After each round SGLang's own sums must come out, and
debug mode compares both sides' books after each call. Requests wait, hit, are computed in chunks, run short of memory
and are retracted, are aborted, and end in the midst of an answer.

Where SGLang is not installed there is nothing to test.
"""

from __future__ import annotations

import importlib.util
import random
import warnings
from typing import Any

import attrs
import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    from bench.engines.sglang import SGLangCache
    from bench.engines.sglang_loop import Scheduling
    from bench.engines.sglang_variants import OurCacheInSGLang

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own

WRONG = -3.0


@attrs.frozen
class Scene:
    """What a random run is made of. All of it follows from the seed."""

    letters: str
    page: int
    tokens: int
    window_share: float
    states: int
    window: int
    chunk: int
    ratio: float
    eagle: bool
    policy: str
    longest_prompt: int
    longest_answer: int
    arrivals: float
    slides: int
    """After so many tokens of an answer SGLang gives back what has left the window."""
    moves_on: bool
    """A long answer gives the window of its prompt free."""


def scene(seed: int) -> Scene:
    rng = random.Random(f"scene {seed}")
    letters = rng.choice(("F", "FS", "FM", "FSM"))
    page = rng.choice((1, 1, 4))
    buffered = "M" in letters and page > 1
    tokens = rng.choice((96, 160, 320))
    return Scene(
        letters=letters,
        page=page,
        tokens=tokens,
        window_share=rng.choice((1.0, 0.5, 0.7)),
        states=rng.choice((12, 20, 40)) if buffered else rng.choice((6, 12, 30)),
        window=rng.choice((3, 6, 13)),
        chunk=rng.choice((8, 16, 32, 1 << 20)),
        ratio=rng.choice((0.05, 0.3, 1.0)),
        eagle="M" not in letters and rng.random() < 0.3,
        policy=rng.choice(("lru", "lru", "lfu", "slru", "priority")),
        longest_prompt=tokens // 3,
        longest_answer=rng.choice((3, 12, 30, tokens // 3)),
        arrivals=rng.choice((0.2, 0.6, 0.9)),
        slides=rng.choice((1, 1, 5)),
        moves_on=rng.random() < 0.5,
    )


class Checked(Scheduling):
    """A scheduler whose passes write what their tokens stand for, and check all that they read."""

    scene: Scene
    rng: random.Random

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, Any], int] = {}
        self.texts: dict[Any, list[float]] = {}
        self.passes = 0
        made = self.scene
        super().__init__(made.letters, made.page, made.tokens, made.states, made.window)

    # ------------------------------------------------------------ what a slot must hold
    def text(self, request: Any) -> list[float]:
        """By position the number of the prefix that ends there; with a draft model, of the token behind it as well."""
        if request not in self.texts:
            tokens = [*request.origin_input_ids, *self.answers[request], -1, -1]
            number, chain = self._number(0, (request.extra_key, request.cache_salt)), []
            for token in tokens:
                number = self._number(number, token)
                chain.append(float(number))
            self.texts[request] = chain
        return self.texts[request]

    def _number(self, before: int, token: Any) -> int:
        return self.numbers.setdefault((before, token), len(self.numbers) + 1)

    def entries(self, request: Any) -> torch.Tensor:
        chain = self.text(request)
        return torch.tensor(chain[1:] if self.scene.eagle else chain)

    # ------------------------------------------------------------ a pass
    def forward(self, batch: Any) -> None:
        self.passes += 1
        self._copy_states(batch)
        extends = batch.forward_mode.is_extend()
        ends = [each.extend_end for each in batch.reqs] if extends else batch.seq_lens_cpu.tolist()
        starts = [each.prefix_len for each in batch.reqs] if extends else [end - 1 for end in ends]
        spans = list(zip(batch.reqs, starts, ends, strict=True))
        if "M" in self.letters:
            self._check_states(spans)
        for request, start, end in spans:  # all write before any reads
            wanted = self.entries(request)[start:end]
            row = self.rows.req_to_token[request.kv.req_pool_idx, start:end].long()
            for pool, slots in self._views(row):
                self._store(pool, slots, wanted)
        for request, start, end in spans:
            self._check_tokens(request, start, end)
        if "M" in self.letters:
            self._write_states(batch, spans, extends)

    def _views(self, row: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
        if "S" not in self.letters:
            return [(self.kv, row)]
        return [
            (self.kv.full_kv_pool, row),
            (self.kv.swa_kv_pool, self.allocator.full_to_swa_index_mapping[row]),
        ]

    @staticmethod
    def _store(pool: Any, slots: torch.Tensor, wanted: torch.Tensor) -> None:
        assert bool((slots > 0).all()), "a pass has no slot to write to"
        for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
            buffer[slots] = wanted.reshape(-1, 1, 1)

    def _check_tokens(self, request: Any, start: int, end: int) -> None:
        wanted = self.entries(request)[:end]
        row = self.rows.req_to_token[request.kv.req_pool_idx, :end].long()
        for number, (pool, slots) in enumerate(self._views(row)):
            low = 0 if number == 0 else max(0, start - (self.scene.window - 1))
            assert bool((slots[low:] > 0).all()), f"{request.rid} reads where it has no slot, before {end}"
            for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
                found = buffer[slots[low:]].reshape(-1)
                bad = (found != wanted[low:]).nonzero().reshape(-1).tolist()
                kind = ("full attention", "the window")[number]
                assert not bad, (
                    f"request {request.rid} reads wrong {kind} at {low + bad[0]}, in a pass [{start}, {end})"
                )

    def _check_states(self, spans: Any) -> None:
        for request, start, _ in spans:
            if request.finished():
                continue
            slot = int(request.kv.mamba_pool_idx)
            wanted = self.text(request)[start - 1] if start else 0.0
            for tensor in self._state_tensors():
                found = float(tensor[slot].reshape(-1)[0])
                assert found == wanted, f"request {request.rid} goes on at {start} from a wrong state"

    def _state_tensors(self) -> list[Any]:
        state = self.rows.mamba_pool.mamba_cache
        return [state.conv[0][0], state.temporal[0]]

    def _write_states(self, batch: Any, spans: Any, extends: bool) -> None:
        for i, (request, _, end) in enumerate(spans):
            if request.kv.mamba_pool_idx is None:
                continue  # it ended with the pass before, and this one's result counts no more
            writes = [(int(request.kv.mamba_pool_idx), end)]
            if batch.mamba_track_mask is not None and bool(batch.mamba_track_mask[i]):
                target = int(batch.mamba_track_indices[i])
                writes.append((target, request.kv.mamba_last_track_seqlen if extends else end))
            for slot, boundary in writes:
                for tensor in self._state_tensors():
                    tensor[slot] = self.text(request)[boundary - 1]

    # ------------------------------------------------------------ after a round
    def kept(self, request: Any) -> int | None:
        if "M" in self.letters or self.rng.random() > 0.2:
            return None
        answered = len(request.output_ids)
        return self.rng.randint(max(1, answered - 1) if self.scene.moves_on else 1, answered)

    def check(self) -> None:
        for pool, (found, whole) in self.sums().items():
            assert found == whole, f"{pool}: {found} slots add up, and there are {whole}"
        if not self._live:
            self.cache.sanity_check()


def make(seed: int, own: bool = False) -> Checked:
    made = scene(seed)
    parameters = {"is_eagle": made.eagle, "eviction_policy": made.policy}
    members = {
        "scene": made, "rng": random.Random(f"kept {seed}"), "parameters": parameters, "chunk": made.chunk,
        "ratio": made.ratio, "window_share": made.window_share,
    }  # fmt: skip
    base = SGLangCache if own else OurCacheInSGLang
    return type("Made", (Checked, base), members)()


def drive(seed: int, requests: int = 40, own: bool = False) -> Checked:
    """Run random traffic to its end."""
    rng = random.Random(f"traffic {seed}")
    envs.SGLANG_OPT_RELEASE_PREFILL_SWA.set(scene(seed).moves_on)
    envs.SGLANG_SWA_EVICTION_INTERVAL.set(scene(seed).slides)
    made = make(seed, own)
    stories = [[rng.randrange(1000) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    sent, still = 0, 0
    while sent < requests or made.busy:
        while sent < requests and (rng.random() < made.scene.arrivals or not made.busy):
            story = rng.choice(stories)
            prompt = story[: rng.randint(1, len(story))] if rng.random() < 0.3 else list(story)
            prompt += [rng.randrange(1000) for _ in range(rng.randint(1, 24))]
            prompt = prompt[-made.scene.longest_prompt :]
            answer = [rng.randrange(1000, 2000) for _ in range(rng.randint(1, made.scene.longest_answer))]
            made.submit(
                prompt,
                answer,
                extra_key=rng.choice((None, None, None, "adapter")),
                cache_salt=rng.choice((None, None, None, "salt")),
                priority=rng.choice((None, 0, 5)),
            )
            sent += 1
            if rng.random() < 0.6:
                stories[rng.randrange(3)] = [*prompt, *answer]
        moved = made.iterate()
        made.check()
        happening = rng.random()
        if happening < 0.04 and made._live:
            made.abort_request(rng.choice(made._live))
        elif happening < 0.06 and made.waiting:
            made.abort_request(rng.choice(made.waiting))
        elif happening < 0.1:
            made.evict(rng.choice((1, 7, 50)))
            made.check()
        still = 0 if moved else still + 1
        assert still < 5 or not made.busy, "the scheduler stands still"
    made.check()
    return made


SEEDS = (*range(24), 347)
"""In 347 a request ends where SGLang's next pass writes into the state that the request hands over."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_traffic(seed: int) -> None:
    made = drive(seed)
    assert made.passes > 40
    made.cache.reset()
    made.allocator.clear()
    made.rows.clear()
    made.check()


def test_what_windows_can_give_while_a_request_runs_is_told() -> None:
    """Of a long chunk, the request protects a window at its end. SGLang admits others by what is left."""
    made = scheduler_of("FS", 1, tokens=200, window=6)
    request = made.submit(range(100), range(1000, 1040))
    while not request.output_ids:
        made.iterate()
    can = made.cache.swa_evictable_size()
    assert can == 100 - 5, "SGLang's windows reach five tokens back"
    assert made.cache.evict(EvictParams(swa_num_tokens=can)).swa_num_tokens_evicted == can
    assert made.cache.swa_evictable_size() == 0
    while made.busy:
        made.iterate()
        made.check()


def test_a_long_answer_gives_the_window_of_its_prompt_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_RELEASE_PREFILL_SWA", "1")
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "1")
    made = scheduler_of("FS", 1, tokens=200, window=6)
    request = made.submit(range(40), range(1000, 1060))
    while len(request.output_ids) < 30:
        made.iterate()
        made.check()
    assert request.kv.cache_protected_len > 60, "what was decoded is published while the request runs"
    assert made.cache.swa_protected_size() <= 6
    made.evict(200)
    made.check()
    while made.busy:
        made.iterate()
        made.check()


def scheduler_of(
    letters: str, page: int, *, tokens: int, window: int, states: int = 40, own: bool = False, **parameters: Any
) -> Checked:
    made = attrs.evolve(
        scene(0), letters=letters, page=page, tokens=tokens, window=window, states=states, window_share=1.0,
        eagle=False, moves_on=True,
    )  # fmt: skip
    members = {"scene": made, "rng": random.Random(0), "parameters": parameters}
    return type("Made", (Checked, SGLangCache if own else OurCacheInSGLang), members)()


# ------------------------------------------------------------ states of a request that ends


def states_after(prompt: int, answer: int, others: tuple[int, ...], *, own: bool = False) -> int | None:
    """How many tokens hit when a conversation goes on, with SGLang's extra buffer of states and steps of 8 tokens.

    ``others``: after so many rounds another request arrives, and its prefill comes between two decode passes of the
    first. None: the conversation goes on from a state that is not its own.
    """
    made = scheduler_of("FM", 4, tokens=400, window=6, own=own)
    first = made.submit(range(prompt), range(1000, 1000 + answer))
    rounds = 0
    while made.busy:
        if rounds in others:
            made.submit(range(2000 + 100 * rounds, 2005 + 100 * rounds), [3000, 3001])
        made.iterate()
        rounds += 1
    second = made.submit([*first.origin_input_ids, *first.output_ids, 4000, 4001], [4002])
    try:
        while made.busy:
            made.iterate()
    except AssertionError as wrong:
        assert "from a wrong state" in str(wrong)
        return None
    made.check()
    return made.hits[second]


def test_a_request_that_ends_with_its_first_token_keeps_the_state_of_its_prompt() -> None:
    """The pass that still runs is the first after the prompt. At 8 tokens it writes to the other place."""
    assert states_after(7, 1, ()) == states_after(7, 1, (), own=True) == 4


SCHEDULES = [(7, 9, ()), (4, 12, (5,)), (4, 12, (3, 5))]
"""Schedules after which SGLang's own cache goes on from a state that a pass has overwritten."""


@pytest.mark.parametrize(("prompt", "answer", "others"), SCHEDULES)
def test_a_state_that_a_running_pass_overwrites_is_not_kept(prompt: int, answer: int, others: tuple[int, ...]) -> None:
    """The turn to the other place was left out, or was made twice. What the prompt has handed over is there."""
    assert states_after(prompt, answer, others, own=True) is None
    assert states_after(prompt, answer, others) == prompt // 4 * 4


@pytest.mark.parametrize("prompt", range(4, 12))
def test_ours_hits_what_sglangs_own_cache_hits_unless_that_is_wrong(prompt: int) -> None:
    for answer in range(1, 19):
        for others in ((), (answer // 2 + 1,)):
            own = states_after(prompt, answer, others, own=True)
            ours = states_after(prompt, answer, others)
            assert ours is not None
            assert own is None or ours >= own, (answer, others)
