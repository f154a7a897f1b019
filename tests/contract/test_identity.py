"""A hit means the same bytes: what is cached under one identity is found under no other."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import CompositionError, Identity, InputError, Path, StorageError, TierManifest
from prefixloom_hicache import HostTier, MemoryBackend
from tests.support.helpers import part, path_cache, serve, settle
from tests.support.stores import TOKENS, composed, idle, read_back
from tests.support.tiers import serve as serve_tier

FIELDS = ("model", "weights", "adapters", "precision", "positions", "salt")
ONE = Identity(model="m", weights="1")


@pytest.mark.parametrize("name", FIELDS)
def test_whatever_differs_is_another_identity(name: str) -> None:
    other = Identity.of({**ONE.facts, name: "another"})
    assert other != ONE and other.namespace("a") != ONE.namespace("a")
    assert ONE.difference(other.facts) == f"{name} is 'another' there and {getattr(ONE, name)!r} here"
    assert Identity.of(ONE.facts) == ONE and Identity.of(ONE.facts).namespace("a") == ONE.namespace("a")


def test_no_two_pairs_of_identity_and_name_are_one_namespace() -> None:
    pairs = [(Identity(model=a, weights=b), c) for a in ("", "x", "xy") for b in ("", "y") for c in ("", "y", "\0y")]
    assert len({identity.namespace(name) for identity, name in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "m", "adapter": "a"}, "no 'adapter': did you mean 'adapters'"),
        ({"modell": "m"}, "did you mean 'model'"),
        ({"model": "m", "colour": "red"}, "no 'colour'$"),
        ({"model": 7}, "model must be of type str, got 7"),
        ("m", "an Identity or a mapping"),
    ],
)
def test_what_an_identity_does_not_have_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(CompositionError, match=said):
        HostTier(TierManifest(capacity=8), identity=given)
    with pytest.raises(CompositionError, match=said):
        path_cache().identity = given


@pytest.mark.parametrize("name", FIELDS)
def test_a_cache_finds_what_was_cached_under_its_identity_alone(name: str) -> None:
    cache = path_cache()
    serve(cache, range(16))
    serve(cache, range(16), namespace="elsewhere")
    cache.identity = ONE
    assert cache.peek(range(16)) == 0
    serve(cache, range(16))
    cache.identity = {**ONE.facts, name: "another"}
    assert cache.peek(range(16)) == 0
    assert "under another identity: other weights, adapters or positions" in cache.match(range(16)).why
    assert cache.peek(range(16), namespace=ONE.namespace()) == 16
    cache.identity = ONE
    assert cache.peek(range(16)) == 16
    cache.identity = None
    assert cache.peek(range(16)) == 16
    settle(cache)


def test_a_namespace_is_dropped_under_every_identity() -> None:
    cache = path_cache()
    other = Identity(model="m", weights="2")
    for identity in (None, ONE, other):
        cache.identity = identity
        for name in ("", "tenant"):
            serve(cache, range(16), namespace=name)
    assert cache.drop_namespace("tenant") == 0
    for identity in (None, ONE, other):
        cache.identity = identity
        assert (cache.peek(range(16)), cache.peek(range(16), namespace="tenant")) == (16, 0)
    assert cache.drop_namespace(other.namespace()) == 0
    assert [cache.peek(range(16), namespace=each.namespace()) for each in (ONE, other)] == [16, 0]
    with pytest.raises(InputError, match="a namespace must be a string"):
        cache.drop_namespace(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FIELDS)
def test_a_store_keeps_identities_apart_whoever_says_them(name: str) -> None:
    """The tier says one for all that it writes, or the cache for the namespaces that it uses."""
    store = MemoryBackend(capacity=1 << 22)
    other = Identity.of({**ONE.facts, name: "another"})
    cache, host = composed(part("path", Path()), store=store)
    host.identity = ONE
    cache.flush()
    serve_tier(cache, TOKENS)
    idle(cache)
    for identity, hit in ((other, 0), (ONE, 40)):
        cache, host = composed(part("path", Path()), store=store)
        host.identity = identity
        cache.flush()
        assert read_back(cache, [*TOKENS, 1]) == hit
    cache.identity = ONE
    assert read_back(cache, [*TOKENS, 1]) == 0


@pytest.mark.parametrize("said", [{}, {"model": "m"}, {"weights": "1"}, {"model": "m", "weights": ""}])
def test_a_store_needs_the_model_and_its_weights(said: dict[str, str]) -> None:
    host = HostTier(TierManifest(capacity=8), identity=said)
    lacking = " and ".join(each for each in ("model", "weights") if not said.get(each))
    with pytest.raises(StorageError, match=f"does not say its {lacking}:"):
        host.attach(MemoryBackend(capacity=1 << 20))
