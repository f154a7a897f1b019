"""``Cache.session``: which adapter is asked, what it may answer, and what is said where nobody knows the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import prefixloom
from prefixloom import (
    Buffer,
    Cache,
    CapacityError,
    Component,
    CompositionError,
    InputError,
    Manifest,
    compose,
    hookimpl,
)
from prefixloom import Path as Whole
from prefixloom.compose.registry import Registry
from tests.support.engines import cache_for, model, nothing_left

pytestmark = pytest.mark.usefixtures("installed")
Adapter = Callable[..., Any]


class Mine:
    """A model of nobody's."""


class Found:
    """An entry point of this process."""

    def __init__(self, name: str, adapter: Adapter) -> None:
        self.name, self.value = name, f"{name}_module"
        self.module = ModuleType(self.value)
        self.module.prefixloom_session = hookimpl(adapter)  # type: ignore[attr-defined]

    def load(self) -> ModuleType:
        return self.module


def cache_with(**adapters: Adapter) -> Cache:
    registry = Registry([Found(f"session:{name}", adapter) for name, adapter in adapters.items()])
    kv = Component("kv", Manifest([Buffer("kv", (1,), "float32")]), Whole())
    return compose(None, plugins=[kv], page_size=4, capacity=64, registry=registry)


@contextmanager
def opened(told: Any) -> Iterator[Any]:
    yield told


def test_the_first_adapter_that_knows_the_model_makes_the_session() -> None:
    asked: list[str] = []

    def unknowing(model: Any) -> None:
        asked.append(type(model).__name__)

    def knowing(cache: Any, model: Any, ids: Any, options: dict[str, Any]) -> Any:
        return opened((cache, model, ids, options))

    def late(model: Any) -> Any:
        raise AssertionError("asked, though another one knew it")

    cache, it = cache_with(a=unknowing, b=knowing, c=late), Mine()
    with cache.session(it, [1, 2], label="mine", beams=3) as told:
        assert told == (cache, it, [1, 2], {"namespace": "", "label": "mine", "beams": 3})
    assert asked == ["Mine"]


def test_where_nobody_knows_the_model_it_is_said_who_was_asked_and_what_to_install() -> None:
    def unknowing(model: Any) -> None:
        return None

    with pytest.raises(CompositionError) as told:
        cache_with(a=unknowing).session(Mine(), [1])
    assert "no installed adapter knows a model of " in str(told.value)
    assert "test_sessions.Mine" in str(told.value)
    assert "Installed: a (a distribution without a name)" in str(told.value)
    assert "session:NAME" in str(told.value)
    with pytest.raises(CompositionError, match="Installed: none"):
        cache_with().session(Mine(), [1])
    cache = cache_for(model())
    with pytest.raises(
        CompositionError, match=r"knows a model of prefixloom_engine\.threeway\.model\.ThreeWay.*transformers \("
    ):
        cache.session(model(), [1])
    with pytest.raises(CompositionError, match=r"knows a model of builtins\.NoneType"):
        cache.session(None, [1])
    nothing_left(cache)


def test_an_adapter_that_raises_or_answers_nonsense_is_named() -> None:
    def broken(model: Any) -> None:
        raise KeyError("layers")

    def nonsense(model: Any) -> int:
        return 7

    with pytest.raises(
        CompositionError, match=r"adapter 'a' \(a distribution.*raised KeyError\('layers'\) for a model"
    ):
        cache_with(a=broken).session(Mine(), [1])
    with pytest.raises(CompositionError, match=r"adapter 'a' .*answered 7: prefixloom_session must return a context"):
        cache_with(a=nonsense).session(Mine(), [1])

    def refusing(model: Any) -> None:
        raise InputError("a prompt has at least one token")

    with pytest.raises(InputError, match="at least one token"):
        cache_with(a=refusing).session(Mine(), [])


def test_an_adapter_that_cannot_be_loaded_is_an_error_and_not_passed_over(distribution: Any) -> None:
    distribution("prefixloom-odd", {"session:odd": "odd_sessions"}, {"odd_sessions": "import nothing_of_this_name"})
    cache = compose(
        None, plugins=[Component("kv", Manifest([Buffer("kv", (1,), "float32")]), Whole())], capacity=64,
        registry=Registry(),
    )  # fmt: skip
    with pytest.raises(CompositionError, match=r"session 'odd' \(distribution prefixloom-odd 1\.0.*failed to import"):
        cache.session(Mine(), [1])


def test_without_transformers_a_model_that_looks_like_one_of_its_is_told_what_to_install() -> None:
    """In a process in which transformers cannot be imported; and the adapter itself can be."""
    source = """
import sys
sys.modules["transformers"] = None
import prefixloom
from prefixloom_engine import ThreeWay, adapter
from prefixloom import CompositionError, compose
from prefixloom.compose.registry import Registry

class Point:
    name, value = "session:transformers", "prefixloom_engine.adapter"
    def load(self):
        return adapter

class Config:
    def get_text_config(self):
        return self

class Model:
    config = Config()
    def generate(self):
        pass

kv = prefixloom.Component("kv", prefixloom.Manifest([prefixloom.Buffer("kv", (1,), "float32")]), prefixloom.Path())
cache = compose(None, plugins=[kv], capacity=64, registry=Registry([Point()]))
for model in (Model(), ThreeWay("tiny")):
    try:
        cache.session(model, [1])
    except CompositionError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert "needs transformers 5.23 or newer" in one
    assert "pip install 'prefixloom[hf]'" in one
    assert "no installed adapter knows a model of prefixloom_engine.threeway.model.ThreeWay" in two


def test_a_model_of_transformers_by_the_name_that_the_cache_has_for_it(one_thread: None) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")
    torch = pytest.importorskip("torch")
    from prefixloom_engine.hf import HFModel, Session

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    it = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = compose(HFModel(it).config, capacity=512, debug=True)
    ids = torch.randint(3, 97, (1, 70))
    plain = it.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    for served, hit in ((it, 0), (HFModel(it), 64)):
        with cache.session(served, ids, chunk=32) as s:
            assert isinstance(s, Session)
            assert s.ready == hit
            out = it.generate(
                ids, past_key_values=s.cache, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
            )
        assert torch.equal(out, plain)
    with pytest.raises(InputError, match="takes namespace, label, chunk, got beams"):
        cache.session(it, ids, beams=2)
    small = compose(HFModel(it).config, capacity=32)
    with pytest.raises((CapacityError, InputError)), small.session(it, ids) as s:
        it.generate(ids, past_key_values=s.cache, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    nothing_left(cache)
    nothing_left(small)


def test_the_core_imports_no_adapter() -> None:
    assert (Path(prefixloom.__file__).parent / "cache" / "session.py").read_text().count("transformers") == 0
