"""What a cache tells a person: why a prompt missed, what its figures mean, and what to do about an error."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from prefixloom import (
    Buffer,
    CapacityError,
    CompositionError,
    InputError,
    Manifest,
    Path,
    Point,
    Profile,
    ProtocolError,
    Window,
    compose,
)
from tests.support.helpers import cache_of, part, path_cache, serve

TOKENS = list(range(100, 140))


@pytest.mark.parametrize(
    ("tokens", "options", "told"),
    [
        ([], {}, "0 of 0 tokens hit: the prompt is empty."),
        (TOKENS[:3], {}, "0 of 3 tokens hit. Tokens 0 to 3: they do not fill a page (a page has 4 tokens)."),
        (TOKENS, {}, "40 of 40 tokens hit."),
        (TOKENS, {"leave": 1}, "36 of 40 tokens hit. Tokens 36 to 40: they were to be left to compute."),
        ([*TOKENS[:10], 1, 2, 3], {}, "8 of 13 tokens hit. Tokens 8 to 12: the prompt parts from what is cached"),
        (TOKENS, {"namespace": "other"}, "0 of 40 tokens hit. Tokens 0 to 40: the same tokens are cached in another"),
    ],
)
def test_a_plan_says_why_the_hit_is_no_longer(tokens: list[int], options: dict[str, object], told: str) -> None:
    cache = path_cache()
    serve(cache, TOKENS)
    plan = cache.match(tokens, **options)  # type: ignore[arg-type]
    assert plan.why.startswith(told)
    cache.core.index.lose()
    assert plan.why.startswith(told), "also of a stale plan"


def test_a_plan_names_the_component_that_limits_it() -> None:
    cache = cache_of(part("path", Path()), part("near", Window(10)))
    serve(cache, TOKENS)
    cache.evict({"near": 64})
    assert "component 'near' lacks 28 to 40 to resume at 40" in cache.match(TOKENS).why


def test_stats_read_as_sentences() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    serve(cache, TOKENS)
    serve(cache, TOKENS)
    text = str(cache.stats())
    assert "40 of 80 tokens hit (50%)" in text
    assert "path: 64 pages of 4 tokens" in text
    assert "state slots" in text


def test_a_step_takes_each_sequence_once() -> None:
    cache = path_cache()
    with cache.open(TOKENS) as sequence, pytest.raises(InputError, match="each sequence once"):
        cache.step([sequence, sequence])


def test_a_closed_sequence_does_not_tell_pages_that_are_somebody_elses() -> None:
    cache = path_cache()
    sequence = cache.open(TOKENS)
    sequence.close()
    with pytest.raises(ProtocolError, match="holds nothing any more"):
        sequence.pages("path")


def test_a_refusal_says_what_to_do() -> None:
    cache = path_cache(tokens=16)
    with cache.open(TOKENS[:16]) as one, cache.open(TOKENS[16:24]) as other:
        one.grow(16)
        with pytest.raises(CapacityError, match=r"a sequence opened without a label.*Close or wait for a sequence"):
            other.grow(8)


@pytest.mark.parametrize("memory", ["10000TiB", "100000000TiB"])
def test_memory_that_no_machine_has_is_refused_as_a_composition(memory: str) -> None:
    with pytest.raises(CompositionError, match=r"cannot be had on device 'cpu'|are the most"):
        compose(None, plugins=[part("path", Path())], memory=memory)


def test_wrong_shapes_of_a_manifest_and_a_profile_are_refused_with_the_right_way() -> None:
    with pytest.raises(CompositionError, match="a sequence of Buffer values: write \\[Buffer"):
        Manifest(Buffer("k", (1,)))  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="write \\[2\\]"):
        Buffer("k", 2)  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="must be a sequence of ComponentSpec values"):
        Profile("sink")  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="named by a Profile"):
        compose(None, plugins="swa", capacity=64)


def test_composing_warns_of_nothing_in_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path_cache()


def test_a_namespace_that_is_a_kind_of_string_is_its_text() -> None:
    cache = path_cache()
    with cache.open([1] * 8, namespace=np.str_("a")) as sequence:
        sequence.grow(8)
        sequence.commit()
    assert cache.peek([1] * 8, namespace="a") == 8
