"""``session``: plain ``generate`` over a composed cache, turn by turn; what it refuses, and that nothing is left."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from transformers import DynamicCache

import prefixloom.tiers.host_copies
from prefixloom import CapacityError, CompositionError, InputError, ProtocolError, TierManifest
from prefixloom_engine import Engine, Request
from prefixloom_engine.hf import HFModel, session
from prefixloom_hicache import HostTier
from prefixloom_hicache.file_store.backend import FileBackend
from tests.support.hf_models import CONFIGS, MATRIX, Served, distance, figure, model_of, prompt
from tests.support.hf_tiny import tiny_model
from tests.support.sampling import sampled
from tests.support.stores import write_out

EACH = pytest.mark.parametrize("name", MATRIX)
pytestmark = pytest.mark.usefixtures("one_thread")


def ids_of(tokens: list[int]) -> torch.Tensor:
    return torch.tensor([tokens])


def generated(model: Any, ids: torch.Tensor, count: int, cache: Any = None, **options: Any) -> list[int]:
    """With a mask of ones: a random model says its own pad token, and ``generate`` would hide it in the next turn."""
    out = model.generate(
        ids, past_key_values=cache, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones_like(ids), **options,
    )  # fmt: skip
    return out[0].tolist()


@pytest.fixture(params=["llama"])
def served(request: pytest.FixtureRequest) -> Any:
    """And afterwards nothing is left: no sequence, no slot, no hook on the model."""
    it = Served(request.param, capacity=512)
    hooks = (len(it.model._forward_pre_hooks), len(it.model._forward_hooks))
    yield it
    it.cache.poll()
    it.settled()
    assert (len(it.model._forward_pre_hooks), len(it.model._forward_hooks)) == hooks


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize("name", sampled(MATRIX, 3))
def test_every_turn_hits_what_was_said_and_generates_the_same(name: str) -> None:
    """Whatever the chunks in which the prompt is computed."""
    served, tokens, said = Served(name), prompt(1, 170), 0
    for turn, (count, chunk) in enumerate(((40, 16), (90, None), (30, 50))):
        ids = ids_of(tokens)
        with session(served.cache, served.model, ids, chunk=chunk) as s:
            assert s.ready == (said // served.page * served.page if turn else 0)
            assert s.cache.get_seq_length() >= 128
            out = generated(served.model, ids, count, s.cache)
        assert out == generated(served.model, ids, count)
        said = len(out) - 1  # the last token was chosen, and not computed
        tokens = out + prompt(count, 20)
    served.settled()


@EACH
def test_what_a_session_computes_is_transformers_own_to_the_bit(name: str) -> None:
    """Called as a model, in passes as they come; a hit in between."""
    served, tokens = Served(name), prompt(2, 150)
    cuts = (128, 149, 150)
    expected = served.plain(tokens, cuts)
    for _ in range(2):
        with session(served.cache, served.model, ids_of(tokens)) as s, torch.no_grad():
            start = s.cache.get_seq_length()
            rows = []
            for cut in cuts:
                if cut > start:
                    rows.append(served.model(ids_of(tokens[start:cut]), past_key_values=s.cache).logits[0])
                    start = cut
        found = torch.cat(rows)
        if name == "lfm3":  # single-token states are on the grid there, so its hits are deeper than 128
            assert distance(found, expected[-len(found) :]) < figure(name)
        else:
            assert torch.equal(found, expected[-len(found) :])


@pytest.mark.parametrize("name", ["llama", "lfm3"])
@pytest.mark.parametrize("fetch", ["wait", "timeout", "best_effort"])
def test_a_session_after_a_restart_waits_for_the_store_as_long_as_its_tier_says(
    fetch: Any, name: str, tmp_path: Path
) -> None:
    ids, model = ids_of(prompt(3, 150)), {"model": name, "weights": "1"}
    for hit in (0, 0 if fetch == "best_effort" else 144):
        tier = HostTier(TierManifest(memory="8MiB"), identity=model, fetch=fetch, fetch_base=60.0)
        served = Served(name, plugins=[tier])
        tier.attach(FileBackend(tmp_path / "store", 1 << 28))
        served.cache.poll()
        with session(served.cache, served.model, ids) as s:
            assert s.ready == hit
            assert generated(served.model, ids, 4, s.cache) == generated(served.model, ids, 4)
        write_out(served.cache)
        tier.detach()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_was_computed_from_a_copy_that_failed_is_not_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single token is asked for: there is no further pass to which the cache could say so."""
    manifest = TierManifest(memory="8MiB", write="through", overlap=True)
    served = Served(name, plugins=[HostTier(manifest)])
    with session(served.cache, served.model, ids_of(prompt(3, 100))) as s:
        out = generated(served.model, ids_of(prompt(3, 100)), 1, s.cache)
    served.cache.evict({part.name: part.capacity for part in served.cache.composition.parts})

    def broken(source: Any, src: Any, target: Any, dst: Any, *more: Any) -> None:
        for buffer in target.buffers.values():
            buffer[:, list(dst)] = 7
        time.sleep(0.3)  # the pass has begun, and waits for it
        raise OSError("a copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(prefixloom.tiers.host_copies, "copy_between", broken)
        with (
            pytest.raises(ProtocolError, match=r"pen .* again") as told,
            session(served.cache, served.model, ids_of(prompt(3, 100))) as s,
        ):
            assert s.ready
            with pytest.raises(ProtocolError, match=r"pen .* again"):
                generated(served.model, ids_of(prompt(3, 100)), 1, s.cache)
            generated(served.model, ids_of(prompt(3, 100)), 1, s.cache)  # nor is it after that
    assert isinstance(told.value.__cause__, OSError)
    served.cache.poll()
    served.settled()
    with session(served.cache, served.model, ids_of(prompt(3, 100))) as s:
        assert generated(served.model, ids_of(prompt(3, 100)), 1, s.cache) == out
    served.settled()


def test_namespaces_share_nothing_and_a_whole_hit_leaves_a_token_to_compute(served: Served) -> None:
    tokens, hits = prompt(5, 64), []
    for namespace in ("a", "b", "a"):
        with session(served.cache, HFModel(served.model), tokens, namespace=namespace, label="mine") as s:
            hits.append(s.ready)
            assert repr(s.sequence).startswith("<mine")
            assert generated(served.model, ids_of(tokens), 5, s.cache) == generated(served.model, ids_of(tokens), 5)
    assert hits == [0, 0, 48]


def test_a_branch_of_a_conversation_hits_where_it_parts() -> None:
    served, trunk = Served("lfm3"), prompt(6, 128)
    ready = []
    for seed in (1, 2, 3):
        ids = ids_of(trunk[:96] + prompt(seed, 40))
        with session(served.cache, served.model, ids) as s:
            ready.append(s.ready)
            assert generated(served.model, ids, 3, s.cache) == generated(served.model, ids, 3)
    assert ready == [0, 0, 96]  # the second is told where they part, and leaves a state there


def test_two_sessions_of_one_model_do_not_meet_and_each_may_go_on_with_its_answer(served: Served) -> None:
    one, two = ids_of(prompt(7, 40)), ids_of(prompt(8, 50))
    with session(served.cache, served.model, one) as a, session(served.cache, served.model, two) as b:
        first = generated(served.model, one, 6, a.cache)
        assert first == generated(served.model, one, 6)
        assert generated(served.model, two, 6, b.cache) == generated(served.model, two, 6, DynamicCache())
        more = ids_of([*first, 7, 8, 9])
        assert generated(served.model, more, 5, a.cache) == generated(served.model, more, 5)


def test_a_model_that_compiles_itself_computes_a_session_as_it_computes_without_one() -> None:
    model, ids = tiny_model("llama", num_hidden_layers=1), ids_of(prompt(28, 64))
    served, expected = Served("llama", model=model), generated(model, ids, 2)
    torch._dynamo.reset()
    model.compile(backend="eager")
    for ready in (0, 48):
        with session(served.cache, model, ids) as s:
            assert s.ready == ready
            assert generated(model, ids, 2, s.cache) == expected


# ---------------------------------------------------------------- what goes wrong


class Broken(Exception):
    pass


def breaking(at: int, error: type[BaseException] = Broken) -> Any:
    """A hook that raises in the ``at``-th pass."""
    passes = []

    def hook(module: Any, args: Any, output: Any) -> None:
        passes.append(1)
        if len(passes) == at:
            raise error

    return hook


@pytest.mark.parametrize(
    ("served", "at"), [("llama", 1), ("llama", 5), ("lfm3", 2), ("lfm3", 5), ("olmo_hybrid", 1)], indirect=["served"]
)
def test_an_exception_inside_of_the_model_leaks_nothing(served: Served, at: int) -> None:
    ids = ids_of(prompt(10, 140))
    handle = served.model.model.layers[2].register_forward_hook(breaking(at))
    try:
        with pytest.raises(Broken), session(served.cache, served.model, ids) as s:
            generated(served.model, ids, 8, s.cache)
    finally:
        handle.remove()
    with session(served.cache, served.model, ids) as s:
        assert generated(served.model, ids, 8, s.cache) == generated(served.model, ids, 8)


def test_an_exception_in_the_block_publishes_nothing_more(served: Served) -> None:
    ids, out = ids_of(prompt(10, 100)), []
    with pytest.raises(Broken), session(served.cache, served.model, ids) as s:
        out = generated(served.model, ids, 8, s.cache)
        raise Broken
    assert len(out) == 108
    assert served.cache.peek(out) == 0


def test_a_pass_that_failed_may_be_repeated_where_nothing_recurs(served: Served) -> None:
    ids = ids_of(prompt(11, 40))
    handle = served.model.model.layers[1].register_forward_hook(breaking(3))
    with session(served.cache, served.model, ids) as s:
        with pytest.raises(Broken):
            generated(served.model, ids, 8, s.cache)
        assert s.cache.get_seq_length() == 41
        so_far = generated(served.model, ids, 1)
        other = ids_of([*so_far, 5])  # something else than what the failed pass was given
        out = generated(served.model, other, 10, s.cache)
        assert out == generated(served.model, other, 10)
        namespace = s.sequence.namespace
    handle.remove()
    assert (
        served.cache.peek(out, namespace=namespace) == 48
    )  # under the names of what was computed, and not of what was given up


def test_a_state_that_a_failed_pass_may_have_written_is_not_gone_on_from() -> None:
    served, ids = Served("lfm3"), ids_of(prompt(11, 40))
    handle = served.model.model.layers[1].register_forward_hook(breaking(3))
    with pytest.raises(ProtocolError, match="may have written half a state"):  # noqa: SIM117
        with session(served.cache, served.model, ids) as s:
            with pytest.raises(Broken):
                generated(served.model, ids, 8, s.cache)
            so_far = generated(served.model, ids, 2)
            generated(served.model, ids_of(so_far), 6, s.cache)
    handle.remove()
    served.settled()


def test_a_prompt_that_the_pools_cannot_hold_is_refused_and_leaves_nothing(served: Served) -> None:
    ids = ids_of(prompt(12, 600))
    with pytest.raises(InputError, match="longer than the pool of component 'full', which holds 512"):  # noqa: SIM117
        with session(served.cache, served.model, ids) as s:
            generated(served.model, ids, 2, s.cache)
    with (
        session(served.cache, served.model, prompt(13, 400)) as s,
        torch.no_grad(),
        pytest.raises(CapacityError, match="full"),
        session(served.cache, served.model, prompt(14, 400)) as other,
    ):
        served.model(ids_of(prompt(13, 400)), past_key_values=s.cache)
        served.model(ids_of(prompt(14, 400)), past_key_values=other.cache)


# ---------------------------------------------------------------- what is refused


def passed(**more: Any) -> Callable[[Any, Any, torch.Tensor], Any]:
    """A pass of the model over the session's tokens, given more."""

    def call(model: Any, s: Any, ids: torch.Tensor) -> Any:
        return model(**{"input_ids": ids, "past_key_values": s.cache, **more})

    return call


def asked(**options: Any) -> Callable[[Any, Any, torch.Tensor], Any]:
    """A ``generate`` of the session's tokens, with options."""

    def call(model: Any, s: Any, ids: torch.Tensor) -> Any:
        given = {"max_new_tokens": 4, "attention_mask": torch.ones_like(ids), "past_key_values": s.cache, **options}
        return model.generate(ids, **given)

    return call


def asked_twice(model: Any, s: Any, ids: torch.Tensor) -> None:
    generated(model, ids, 5, s.cache)
    generated(model, ids, 5, s.cache)


def hiding_a_token_of_the_past(model: Any, s: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, 7] = 0
    model(ids[:, :39], past_key_values=s.cache)
    model(ids[:, 39:], past_key_values=s.cache, attention_mask=mask)


def under_autocast(model: Any, s: Any, ids: torch.Tensor) -> None:
    with torch.autocast("cpu"):
        model(ids, past_key_values=s.cache)


def with_gradients(model: Any, s: Any, ids: torch.Tensor) -> None:
    with torch.enable_grad():
        model(ids, past_key_values=s.cache)


IDS = prompt(19, 40)
OTHER = ids_of(prompt(16, 40))
ZEROS = torch.zeros(1, 40, dtype=torch.int64)
ALL_ONES = "attention_mask must be all ones"
REFUSED: dict[str, tuple[str, Callable[[Any, Any, torch.Tensor], Any], str]] = {
    "beams": ("llama", asked(num_beams=2), r"\(1, n\), got \(2, 40\); num_beams and num_return_sequences must be 1"),
    "answers": ("llama", asked(num_return_sequences=2, do_sample=True), r"shape \(1, n\), got \(2, 40\)"),
    "assistant": ("llama", asked(prompt_lookup_num_tokens=2), "engine speculates"),
    "no cache": ("llama", asked(use_cache=False), r"generate was called without use_cache.*use_cache=True"),
    "left": ("llama", passed(attention_mask=torch.tensor([[0] * 3 + [1] * 37])), r"left padding, its first 3.*3:"),
    "right": ("llama", passed(attention_mask=torch.tensor([[1] * 36 + [0] * 4])), r"right padding, its last 4.*:-4"),
    "holes": ("llama", passed(attention_mask=torch.tensor([[1, 1, 0, 1, 0] * 8])), "has holes, 16 places from 2 to 39"),
    "square": ("llama", passed(attention_mask=torch.zeros(1, 1, 40, 40)), f"{ALL_ONES}.*is not one of ones and zeros"),
    "short": ("llama", passed(attention_mask=torch.ones(1, 39)), r"attention_mask is of shape \(1, 39\)"),
    "weights": ("bloom", passed(attention_mask=torch.full((1, 40), 2)), ALL_ONES),
    "halves": ("bloom", passed(attention_mask=torch.full((1, 40), 0.5)), ALL_ONES),
    "two masks": ("bloom", passed(attention_mask=torch.ones(2, 40)), ALL_ONES),
    "hidden": ("llama", hiding_a_token_of_the_past, ALL_ONES),
    "other tokens": ("llama", passed(input_ids=OTHER), "given other tokens at 0"),
    "fed again": ("llama", asked_twice, "position_ids from 4 to 39, and its tokens are at 44 to 79"),
    "types": ("llama", passed(token_type_ids=ZEROS + 1), "this pass has token_type_ids as well"),
    "types of tokens": ("gpt2", passed(token_type_ids=ZEROS), "this pass has token_type_ids as well"),
    "embeds": ("llama", passed(input_ids=None, inputs_embeds=torch.zeros(1, 40, 32).double()), "has none: inputs"),
    "moved": ("llama", passed(position_ids=torch.arange(3, 43)[None]), "from 3 to 42, and its tokens are at 0 to 39"),
    "turned": ("llama", passed(position_ids=torch.arange(40).flip(0)[None]), "position_ids from 39 to 0"),
    "in two": ("llama", passed(position_ids=torch.tensor([[*range(30), *range(10)]])), "position_ids from 0 to 9"),
    "fewer": ("llama", passed(position_ids=torch.arange(39)[None]), "position_ids of another form"),
    "cache": ("llama", passed(cache_position=torch.arange(5, 45)), "cache_position from 5 to 44"),
    "encoded": ("llama", passed(mm_encoder_outputs={"image": torch.ones(1, 4)}), "has mm_encoder_outputs as well"),
    "pixels": ("llama", passed(pixel_values=torch.zeros(1, 3, 4, 4)), "this pass has pixel_values as well"),
    "heads": ("llama", passed(head_mask=[1.0]), "this pass has head_mask as well"),
    "autocast": ("llama", under_autocast, r"under torch\.autocast.*Call it outside of autocast"),
    "gradients": ("llama", with_gradients, "no_grad"),
    "part": ("llama", lambda model, s, ids: model.model(ids, past_key_values=s.cache), "outside of a pass.*whole"),
    "another": ("llama", lambda _, s, ids: model_of("mistral")(ids, past_key_values=s.cache), "outside of a pass"),
    "other name": ("mamba2", passed(), "Mamba2ForCausalLM takes its cache as cache_params="),
    "scan": (
        "mamba", lambda model, s, ids: model(torch.tensor([[*IDS[-1:], 5]]), cache_params=s.cache, use_cache=True),
        "goes on from a state with single tokens only, and this pass has 2",
    ),
    "two prompts": (
        "mamba", lambda model, s, ids: model(torch.cat([ids, OTHER]), cache_params=s.cache, use_cache=True),
        r"ids of shape \(1, n\), got \(2, 40\)",
    ),
}  # fmt: skip
"""By name: the model, what is done with it in a session, and the words in which it is refused."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_token_ids_do_not_tell_is_refused(name: str) -> None:
    model, call, told = REFUSED[name]
    served = Served(model, model=None if model in CONFIGS else tiny_model(model))
    wrong = pytest.raises((InputError, ProtocolError, CompositionError), match=told)
    with wrong, session(served.cache, served.model, IDS) as s, torch.no_grad():
        call(served.model, s, ids_of(IDS))
    served.settled()


def test_token_types_of_zero_are_taken_where_the_model_does_not_look_them_up_among_its_tokens() -> None:
    gpt2, roc_bert = tiny_model("gpt2"), tiny_model("roc_bert", is_decoder=True)
    with torch.no_grad():
        right = gpt2(ids_of(IDS)).logits
        assert not torch.allclose(right, gpt2(ids_of(IDS), token_type_ids=ZEROS).logits)
    served = Served("gpt2", model=gpt2)
    with Engine(served.hf, served.cache) as engine, pytest.raises(InputError, match="has token_type_ids"):
        engine.add(Request(IDS, 4, inputs={"token_type_ids": ZEROS}))
    served = Served("roc_bert", model=roc_bert)
    with session(served.cache, roc_bert, IDS) as s, torch.no_grad():
        found = roc_bert(ids_of(IDS), past_key_values=s.cache, token_type_ids=ZEROS).logits
    assert torch.allclose(found, roc_bert(ids_of(IDS)).logits)


def test_a_generation_config_with_a_cache_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("llama")
    monkeypatch.setattr(served.model.generation_config, "cache_implementation", "static")
    with pytest.raises(CompositionError, match=r"cache_implementation='static'.*cache_implementation = None"):
        session(served.cache, served.model, IDS)


def test_generate_goes_on_in_a_session_of_a_model_that_is_all_states() -> None:
    """transformers gives such a model its whole prompt, whatever is computed of it."""
    served, ids = Served("mamba2"), ids_of(IDS)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with session(served.cache, served.model, ids) as s:
        found = served.model.generate(ids, cache_params=s.cache, **given)
    assert torch.equal(found, served.model.generate(ids, **given))


def test_what_says_nothing_new_is_taken(served: Served) -> None:
    ids = ids_of(IDS)
    more = {"token_type_ids": ZEROS, "position_ids": torch.arange(40)[None], "pixel_values": None}
    with session(served.cache, served.model, ids) as s, torch.no_grad():
        inputs = {"input_ids": ids, "past_key_values": s.cache, "attention_mask": ids > -1, **more}
        for hook in served.model._forward_pre_hooks.copy().values():
            hook(served.model, (), inputs)
        assert s.sequence.reserved == 40


@pytest.mark.parametrize("name", ["llama", "lfm3", "mamba2"])
def test_a_session_that_no_pass_was_given_says_so_and_what_to_give(name: str) -> None:
    served, ids = Served(name), ids_of(prompt(21, 40))
    told = rf"without any pass over its cache.*give generate {served.runner.cache_name}=s.cache"
    with pytest.warns(UserWarning, match=told), session(served.cache, served.model, ids):
        generated(served.model, ids, 2)
    with session(served.cache, served.model, ids) as s:
        served.model.generate(ids, max_new_tokens=2, **{served.runner.cache_name: s.cache})
    with pytest.raises(Broken), session(served.cache, served.model, ids):
        raise Broken


def test_a_session_that_is_over_or_was_used_is_refused(served: Served) -> None:
    ids = ids_of(prompt(21, 40))
    one = session(served.cache, served.model, ids)
    with one as s:
        generated(served.model, ids, 2, s.cache)
    with pytest.raises(ProtocolError, match="while its session is open"), torch.no_grad():
        served.model(ids, past_key_values=s.cache)
    with pytest.raises(ProtocolError, match="used once"), one:
        pass


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (torch.zeros(2, 5, dtype=torch.long), r"of shape \(1, n\) or \(n,\), got \(2, 5\) in torch.int64"),
        (torch.zeros(5), "in torch.float32"),
        ([], "at least one token"),
        (5, "a tensor or a list of tokens, got 5"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
        ([1, 1 << 20], "the token 1048576: the model's are whole numbers from 0 to"),
        (torch.tensor([[1, -1]]), "the token -1: "),
        (torch.ones(1, 2, dtype=torch.bool), "the token True: "),
    ],
)
def test_ids_that_are_no_conversation_are_refused(served: Served, ids: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        session(served.cache, served.model, ids)
    with pytest.raises(InputError, match="chunk takes a number of tokens from 1 up, got 0"):
        session(served.cache, served.model, [1, 2], chunk=0)


def test_a_session_takes_the_first_and_the_last_token_of_a_vocabulary(served: Served) -> None:
    last = served.model.config.vocab_size - 1
    session(served.cache, served.model, [0, last])
    with pytest.raises(InputError, match=f"the token {last + 1}: the model's are whole numbers from 0 to {last}"):
        session(served.cache, served.model, [0, last + 1])


@pytest.mark.parametrize("what", ["reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "crop"])
def test_what_pools_cannot_do_says_what_to_do_instead(served: Served, what: str) -> None:
    arguments = () if what == "reset" else (1,)
    with pytest.raises(ProtocolError, match=f"a cache over pools has no {what}: "):
        getattr(session(served.cache, served.model, [1, 2, 3]).cache, what)(*arguments)


@pytest.mark.parametrize("served", ["llama", "lfm3"], indirect=True)
def test_an_answer_that_another_thread_computes_is_streamed_to_the_one_that_opened_the_session(served: Served) -> None:
    """As with TextIteratorStreamer, which ends at an error only if somebody ends it."""
    ids = ids_of(prompt(22, 60))
    right = generated(served.model, ids, 6)
    for _ in range(2):
        told: queue.Queue[int | None] = queue.Queue()

        class Streamer:
            put = staticmethod(lambda value, told=told: [told.put(int(each)) for each in value.flatten()])
            end = staticmethod(lambda told=told: told.put(None))

        with session(served.cache, served.model, ids) as s, ThreadPoolExecutor(1) as other:
            answer = other.submit(generated, served.model, ids, 6, s.cache, streamer=Streamer())
            streamed = list(iter(lambda told=told: told.get(timeout=60), None))
            assert answer.result() == right
        assert streamed == right
    assert s.ready == 48


def test_sessions_in_several_threads_take_turns_and_one_ends_in_another(served: Served) -> None:
    """Each thread opens, computes and ends while others do: the cache is in debug mode, which refuses two at once."""
    prompts = [ids_of(prompt(seed, 50)) for seed in range(4)]
    right = [generated(served.model, ids, 6) for ids in prompts]
    opened = session(served.cache, served.model, prompts[0]).__enter__()

    def whole(at: int) -> None:
        for _ in range(3):
            with session(served.cache, served.model, prompts[at]) as s:
                assert generated(served.model, prompts[at], 6, s.cache) == right[at]

    with ThreadPoolExecutor(4) as others:
        ending = [others.submit(whole, at) for at in (1, 2, 3)]
        assert generated(served.model, prompts[0], 6, opened.cache) == right[0]
        ending.append(others.submit(opened.__exit__, None, None, None))
        for each in ending:
            each.result(60)
        served.cache.take_over()
        assert [served.cache.peek(answer) for answer in right] == [48] * 4
        with pytest.raises(ProtocolError, match=r"one thread drives a cache.*take_over"):
            others.submit(served.cache.peek, right[0]).result()


def test_a_thread_that_died_in_a_pass_keeps_nobody_from_the_cache(served: Served) -> None:
    """Its session ends without the hook after the pass: torch calls none for an exception that is no Exception."""
    ids = ids_of(prompt(23, 50))
    right = generated(served.model, ids, 6)
    handle = served.model.model.layers[1].register_forward_hook(breaking(2, SystemExit))
    with pytest.raises(SystemExit), session(served.cache, served.model, ids) as s, ThreadPoolExecutor(1) as other:
        other.submit(generated, served.model, ids, 6, s.cache).result()
    with session(served.cache, served.model, ids) as s:
        assert generated(served.model, ids, 6, s.cache) == right
    handle.remove()
