"""``session``: plain ``generate`` over a composed cache, turn by turn; what it refuses, and that nothing is left."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable
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
from tests.support.hf_models import MATRIX, Served, distance, figure, model_of, prompt
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
    served, tokens, said = Served(name), prompt(1, 100), 0
    for turn, count in enumerate((40, 90, 30)):
        ids = ids_of(tokens)
        with session(served.cache, served.model, ids) as s:
            assert s.ready == (said // served.page * served.page if turn else 0)
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


@EACH
@pytest.mark.parametrize("chunk", [16, 50])
def test_a_prompt_may_be_computed_in_chunks(name: str, chunk: int) -> None:
    served, ids = Served(name), ids_of(prompt(3, 170))
    with session(served.cache, served.model, ids, chunk=chunk) as s:
        assert s.cache.get_seq_length() >= 128
        out = generated(served.model, ids, 4, s.cache)
    assert out == generated(served.model, ids, 4)
    assert served.cache.peek([*out, 5]) >= 128


@EACH
def test_a_conversation_that_left_the_device_comes_back_from_the_host(name: str) -> None:
    served = Served(name, plugins=[HostTier(TierManifest(memory="8MiB", write="through"))])
    ids = ids_of(prompt(3, 150))
    for expected in (0, 149 // served.page * served.page):
        with session(served.cache, served.model, ids) as s:
            assert s.ready == expected
            out = generated(served.model, ids, 4, s.cache)
        assert out == generated(served.model, ids, 4)
        served.cache.poll()
        served.cache.evict(dict.fromkeys(served.components, 10_000))
        assert served.cache.peek(prompt(3, 150)) == 0
    assert served.cache.stats().tier.restored_tokens == expected


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


def test_a_whole_hit_leaves_a_token_to_compute(served: Served) -> None:
    ids = ids_of(prompt(4, 64))
    for expected in (0, 48):
        with session(served.cache, served.model, ids) as s:
            assert s.ready == expected
            assert generated(served.model, ids, 5, s.cache) == generated(served.model, ids, 5)


def test_namespaces_share_nothing_and_ids_may_be_a_list(served: Served) -> None:
    tokens, hits = prompt(5, 70), []
    for namespace in ("a", "b", "a"):
        with session(served.cache, HFModel(served.model), tokens, namespace=namespace, label="mine") as s:
            hits.append(s.ready)
            assert repr(s.sequence).startswith("<mine")
            generated(served.model, ids_of(tokens), 2, s.cache)
    assert hits == [0, 0, 64]


def test_a_branch_of_a_conversation_hits_where_it_parts() -> None:
    served, trunk = Served("lfm3"), prompt(6, 128)
    ready = []
    for seed in (1, 2, 3):
        ids = ids_of(trunk[:96] + prompt(seed, 40))
        with session(served.cache, served.model, ids) as s:
            ready.append(s.ready)
            assert generated(served.model, ids, 3, s.cache) == generated(served.model, ids, 3)
    assert ready == [0, 0, 96]  # the second is told where they part, and leaves a state there


def test_two_sessions_of_one_model_do_not_meet(served: Served) -> None:
    one, two = ids_of(prompt(7, 40)), ids_of(prompt(8, 50))
    with session(served.cache, served.model, one) as a, session(served.cache, served.model, two) as b:
        assert generated(served.model, one, 6, a.cache) == generated(served.model, one, 6)
        assert generated(served.model, two, 6, b.cache) == generated(served.model, two, 6, DynamicCache())


def test_an_answer_may_be_continued_in_the_same_session(served: Served) -> None:
    ids = ids_of(prompt(9, 40))
    with session(served.cache, served.model, ids) as s:
        first = generated(served.model, ids, 5, s.cache)
        more = ids_of([*first, 7, 8, 9])
        assert generated(served.model, more, 5, s.cache) == generated(served.model, more, 5)


def test_a_model_that_compiles_itself_computes_a_session_as_it_computes_without_one(served: Served) -> None:
    model, ids = copy.deepcopy(served.model), ids_of(prompt(28, 64))
    expected = generated(model, ids, 2)
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


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("served", ["llama", "lfm3", "olmo_hybrid"], indirect=True)
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


def test_other_tokens_than_the_sessions_are_refused(served: Served) -> None:
    ids, other = ids_of(prompt(15, 40)), ids_of(prompt(16, 40))
    with session(served.cache, served.model, ids) as s, pytest.raises(InputError, match="given other tokens at 0"):
        generated(served.model, other, 2, s.cache)


def test_the_same_ids_twice_in_a_session_are_refused_where_they_would_be_fed_again(served: Served) -> None:
    ids = ids_of(prompt(17, 40))
    with session(served.cache, served.model, ids) as s:
        generated(served.model, ids, 5, s.cache)
        with pytest.raises(InputError, match=r"position_ids from 4 to 39, and its tokens are at 44 to 79"):
            generated(served.model, ids, 5, s.cache)


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("beams", {"num_beams": 2}, r"ids of shape \(1, n\), got \(2, 40\); num_beams and num_return_sequences must be 1"),
    ("answers", {"num_return_sequences": 2, "do_sample": True}, r"shape \(1, n\), got \(2, 40\)"),
)


@pytest.mark.parametrize(("options", "told"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_several_answers_at_once_are_refused(served: Served, options: dict[str, Any], told: str) -> None:
    ids = ids_of(prompt(18, 40))
    with session(served.cache, served.model, ids) as s, pytest.raises(InputError, match=told):
        served.model.generate(ids, past_key_values=s.cache, max_new_tokens=2, **options)


def test_an_assistant_is_refused(served: Served) -> None:
    ids = ids_of(prompt(18, 40))
    with pytest.raises(ProtocolError, match="engine speculates"), session(served.cache, served.model, ids) as s:
        generated(served.model, ids, 4, s.cache, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"attention_mask": torch.tensor([[0] * 3 + [1] * 37])}, r"left padding, its first 3 places.*ids\[:, 3:\]"),
        ({"attention_mask": torch.tensor([[1] * 36 + [0] * 4])}, r"right padding, its last 4 places.*ids\[:, :-4\]"),
        (
            {"attention_mask": torch.tensor([[1, 1, 0, 1, 0] * 8])},
            "has holes, 16 places from 2 to 39: open the session",
        ),
        (
            {"attention_mask": torch.zeros(1, 1, 40, 40)},
            "attention_mask must be all ones.*is not one of ones and zeros",
        ),
        ({"token_type_ids": torch.ones(1, 40, dtype=torch.long)}, "this pass has token_type_ids as well"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 40, 32).double()}, "this pass has none: inputs_embeds"),
        ({"position_ids": torch.arange(3, 43)[None]}, "position_ids from 3 to 42, and its tokens are at 0 to 39"),
        ({"position_ids": torch.arange(40).flip(0)[None]}, "position_ids from 39 to 0"),
        ({"position_ids": torch.tensor([[*range(30), *range(10)]])}, "position_ids from 0 to 9"),
        ({"position_ids": torch.arange(39)[None]}, "position_ids of another form"),
        ({"cache_position": torch.arange(5, 45)}, "cache_position from 5 to 44"),
        ({"attention_mask": torch.ones(1, 39)}, r"attention_mask is of shape \(1, 39\)"),
        ({"mm_encoder_outputs": {"image": torch.ones(1, 4)}}, "this pass has mm_encoder_outputs as well"),
        ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "this pass has pixel_values as well"),
        ({"head_mask": [1.0]}, "this pass has head_mask as well"),
        ({"use_cache": False}, "without use_cache"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_token_ids_do_not_tell_is_refused(served: Served, more: dict[str, Any], told: str) -> None:
    ids = ids_of(prompt(19, 40))
    with (
        session(served.cache, served.model, ids) as s,
        torch.no_grad(),
        pytest.raises(InputError, match=told),
    ):
        served.model(**{"input_ids": ids, "past_key_values": s.cache, **more})


def test_a_pass_of_one_token_may_hide_nothing_either(served: Served) -> None:
    ids, mask = ids_of(prompt(19, 41)), torch.ones(1, 41)
    mask[0, 7] = 0
    with session(served.cache, served.model, ids) as s, torch.no_grad():
        served.model(ids[:, :40], past_key_values=s.cache)
        with pytest.raises(InputError, match="attention_mask must be all ones"):
            served.model(ids[:, 40:], past_key_values=s.cache, attention_mask=mask)
        served.model(ids[:, 40:], past_key_values=s.cache, attention_mask=torch.ones(1, 41))


@pytest.mark.parametrize("mask", [torch.full((1, 41), 2), torch.full((1, 41), 0.5), torch.ones(2, 41)])
def test_a_mask_that_weighs_tokens_is_refused(mask: torch.Tensor) -> None:
    """Bloom and Mamba multiply by it."""
    served, ids = Served("bloom", model=tiny_model("bloom")), ids_of(prompt(19, 41))
    with session(served.cache, served.model, ids) as s, torch.no_grad():
        with pytest.raises(InputError, match="attention_mask must be all ones"):
            served.model(ids, past_key_values=s.cache, attention_mask=mask)
        served.model(ids, past_key_values=s.cache, attention_mask=torch.ones(1, 41, dtype=torch.bool))


def test_token_types_of_zero_are_refused_where_the_model_looks_them_up() -> None:
    served, tokens = Served("gpt2", model=tiny_model("gpt2")), prompt(19, 40)
    ids, zeros = ids_of(tokens), torch.zeros(1, 40, dtype=torch.int64)
    with torch.no_grad():
        right = served.model(ids).logits
        assert not torch.allclose(right, served.model(ids, token_type_ids=zeros).logits)
    with session(served.cache, served.model, ids) as s, torch.no_grad():
        with pytest.raises(InputError, match="this pass has token_type_ids as well"):
            served.model(ids, past_key_values=s.cache, token_type_ids=zeros)
        assert torch.allclose(right, served.model(ids, past_key_values=s.cache).logits)
    with Engine(served.hf, served.cache) as engine, pytest.raises(InputError, match="has token_type_ids"):
        engine.add(Request(tokens, 4, inputs={"token_type_ids": zeros}))


def test_token_types_of_zero_are_taken_where_they_have_a_table_of_their_own() -> None:
    served, ids = Served("roc_bert", model=tiny_model("roc_bert", is_decoder=True)), ids_of(prompt(19, 40))
    with session(served.cache, served.model, ids) as s, torch.no_grad():
        right = served.model(ids, past_key_values=s.cache, token_type_ids=torch.zeros(1, 40, dtype=torch.int64)).logits
    assert torch.allclose(right, served.model(ids).logits)


def test_a_cache_under_another_name_is_refused() -> None:
    """The models that are all states take whatever else they are given, and would run without the session."""
    served, ids = Served("mamba2"), ids_of(prompt(19, 40))
    told = pytest.raises(InputError, match="Mamba2ForCausalLM takes its cache as cache_params=")
    with told, session(served.cache, served.model, ids) as s, torch.no_grad():
        served.model(ids, past_key_values=s.cache)


def test_what_says_nothing_new_is_taken(served: Served) -> None:
    ids = ids_of(prompt(19, 40))
    more = {"token_type_ids": torch.zeros_like(ids), "position_ids": torch.arange(40)[None], "pixel_values": None}
    with session(served.cache, served.model, ids) as s, torch.no_grad():
        before = served.model._forward_pre_hooks.copy()
        inputs = {"input_ids": ids, "past_key_values": s.cache, **more}
        for hook in before.values():
            hook(served.model, (), inputs)
        assert s.sequence.reserved == 40


def test_autocast_is_refused(served: Served) -> None:
    ids = ids_of(prompt(19, 40))
    told = pytest.raises(CompositionError, match=r"under torch\.autocast")
    with session(served.cache, served.model, ids) as s, torch.no_grad(), torch.autocast("cpu"), told:
        served.model(ids, past_key_values=s.cache)


def test_gradients_are_refused(served: Served) -> None:
    ids = ids_of(prompt(19, 40))
    with session(served.cache, served.model, ids) as s, pytest.raises(InputError, match="no_grad"):
        served.model(ids, past_key_values=s.cache)


def test_a_part_of_the_model_or_another_model_is_refused(served: Served) -> None:
    ids = ids_of(prompt(20, 40))
    for other in (served.model.model, model_of("mistral")):
        with (
            torch.no_grad(),
            pytest.raises(ProtocolError, match=r"layer 0 was called outside of a pass.*called as a whole"),
            session(served.cache, served.model, ids) as s,
        ):
            other(ids, past_key_values=s.cache)


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


class InAnotherThread(threading.Thread):
    """Runs a call, and raises what it raised when it is joined."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.error = call, None
        self.start()

    def run(self) -> None:
        try:
            self.call()
        except BaseException as error:
            self.error = error

    def join(self, timeout: float | None = 60) -> None:
        super().join(timeout)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


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

        with session(served.cache, served.model, ids) as s:
            worker = InAnotherThread(lambda s=s: generated(served.model, ids, 6, s.cache, streamer=Streamer()))
            streamed = list(iter(lambda told=told: told.get(timeout=60), None))
            worker.join()
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

    threads = [InAnotherThread(lambda at=at: whole(at)) for at in (1, 2, 3)]
    assert generated(served.model, prompts[0], 6, opened.cache) == right[0]
    threads.append(InAnotherThread(lambda: opened.__exit__(None, None, None)))
    for thread in threads:
        thread.join()
    served.cache.take_over()
    assert [served.cache.peek(answer) for answer in right] == [48] * 4
    with pytest.raises(ProtocolError, match=r"one thread drives a cache.*take_over"):
        InAnotherThread(lambda: served.cache.peek(right[0])).join()


def test_a_thread_that_died_in_a_pass_keeps_nobody_from_the_cache(served: Served) -> None:
    """Its session ends without the hook after the pass: torch calls none for an exception that is no Exception."""
    ids = ids_of(prompt(23, 50))
    right = generated(served.model, ids, 6)
    handle = served.model.model.layers[1].register_forward_hook(breaking(2, SystemExit))
    with pytest.raises(SystemExit), session(served.cache, served.model, ids) as s:
        InAnotherThread(lambda: generated(served.model, ids, 6, s.cache)).join()
    with session(served.cache, served.model, ids) as s:
        assert generated(served.model, ids, 6, s.cache) == right
    handle.remove()
