"""Plans: what is told of a budget is what the cache does with it."""

from __future__ import annotations

from array import array
from typing import Any

import attrs
import pytest

from prefixloom import CapacityError, Traffic
from prefixloom.lab.plan import cost_of, describe_plan, fit_of, make_plan, name_of, traffic_of
from prefixloom.lab.service import Service
from prefixloom.lab.setup import Setup
from prefixloom.lab.traces.synthetic import SyntheticTrace

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "dtype": "float32", "vocab_size": 1000,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64, "dtype": "float32", "vocab_size": 1000,
}  # fmt: skip
SERVICE = Service(max_running=4, chunk=256)
WHOLE = Service(max_running=4, chunk=4096)
TRAFFIC = Traffic(running=4, prompt=640, output=64, shared=0.3, chunk=256)


@pytest.mark.parametrize(("length", "common"), [(64, 0), (1000, 0), (1000, 480), (2048, 512)])
def test_the_cost_of_a_request_is_what_its_reaches_need(length: int, common: int) -> None:
    states = cost_of(Setup(HYBRID, service=SERVICE), length, common)
    ends = length // 64 * 64  # states are exact at multiples of 64
    assert states.kept == {"full": ends // 16, "mamba": 1}
    assert states.next == {"full": (ends - common // 64 * 64) // 16, "mamba": 1}
    assert states.running["full"] == -(-length // 16)
    windows = cost_of(Setup(WINDOWS, service=SERVICE), length, common)
    ends = length // 16 * 16
    assert windows.kept["swa"] == -(-ends // 16) - max(0, ends - 63) // 16
    assert windows.running["swa"] <= min(-(-length // 16), -(-(64 + 256) // 16) + 2)


@pytest.mark.parametrize("model", [HYBRID, WINDOWS], ids=["states", "windows"])
def test_so_many_requests_stay_cached_and_no_more(model: dict[str, Any]) -> None:
    setup = Setup(model, memory="4MiB", traffic=TRAFFIC, service=WHOLE)
    fit = fit_of(setup.compose(), cost_of(setup, TRAFFIC.length, TRAFFIC.common))
    assert fit.cached > 4

    def kept(requests: int) -> bool:
        """Whether all of so many requests resume at their ends after they were served once."""
        cache = setup.compose()
        prompts = [
            array("i", [0]) * TRAFFIC.common + array("i", [number]) * (TRAFFIC.length - TRAFFIC.common)
            for number in range(1, requests + 1)
        ]
        for prompt in prompts:
            with cache.open(prompt, leave=0) as sequence:
                compute(cache, sequence, len(prompt))
        return all(cache.peek(prompt) == len(prompt) for prompt in prompts)

    assert kept(fit.cached - 1)  # beside these, the last one that is served takes room while it runs
    assert not kept(fit.cached + 1)


@pytest.mark.parametrize("model", [HYBRID, WINDOWS], ids=["states", "windows"])
def test_so_many_requests_run_at_once(model: dict[str, Any]) -> None:
    setup = Setup(model, memory="4MiB", traffic=TRAFFIC, service=WHOLE)
    cache = setup.compose()
    fit = fit_of(cache, cost_of(setup, TRAFFIC.length, 0))
    running: list[Any] = []
    with pytest.raises(CapacityError) as raised:
        for number in range(fit.running + 2):
            running.append(cache.open(array("i", [number + 1]) * TRAFFIC.length, leave=0))
            running[-1].grow(TRAFFIC.length)
    done = sum(sequence.reserved == TRAFFIC.length for sequence in running)
    assert fit.running <= done <= fit.running + 1
    assert fit.running_limit in str(raised.value)
    for sequence in running:
        sequence.abort()


def compute(cache: Any, sequence: Any, length: int) -> None:
    sequence.grow(length - sequence.reserved)
    with cache.step([sequence]) as step:
        step.run_ops()


def test_a_plan_tells_the_curve_the_knee_and_what_is_short() -> None:
    trace = SyntheticTrace(TRAFFIC, users=12, requests=150, think=5)
    setup = Setup(HYBRID, memory="2MiB", service=SERVICE)
    sizes = (1, 2, 4, 8, 16)
    plan = make_plan(setup, trace, sizes=sizes, pages=(16, 64, 128), grids=(0, 128), lengths=(512,))
    rates = [each.hit_rate for each in plan.curve]
    assert rates[0] < rates[2] <= rates[-1] == max(rates)
    assert [each.policy for each in plan.curve] == [name_of(part) for part in sizes]
    knee = plan.knee
    assert knee is not None and knee.hit_rate > rates[-1] - 0.02
    assert [each.page for each in plan.pages] == [64, 128] and len(plan.grids) == 2
    assert plan.short_first in plan.page_bytes
    alone = {name: use.alone for name, use in plan.curve[0].components.items()}
    assert alone[plan.short_first] == min(each for each in alone.values() if each is not None)
    text = "\n".join(describe_plan(plan))
    assert "512" in text and f"{plan.fit.cached:,} stay cached" in text
    assert plan.as_dict()["knee"] == knee.bytes


def test_what_a_budget_cannot_hold_is_a_note() -> None:
    trace = SyntheticTrace(TRAFFIC, users=2, requests=5)
    plan = make_plan(
        Setup(HYBRID, memory="600KiB", service=SERVICE), trace, sizes=(0.01, 1), pages=(16, 5000), grids=()
    )
    assert [each.policy for each in plan.curve] == [name_of(1)]
    assert len(plan.notes) == 2 and any("pages of 5000" in note for note in plan.notes)


def test_traffic_is_read_from_a_trace() -> None:
    trace = SyntheticTrace(Traffic(prompt=2048, output=128, shared=0.25), users=20, requests=600, seed=3)
    found = traffic_of(trace, 7)
    assert found.running == 7 and found.output == 128
    assert found.prompt == pytest.approx(2048, rel=0.25)
    assert found.shared == pytest.approx(0.25, abs=0.1)


def test_a_synthetic_trace_is_the_same_again_and_each_turn_goes_on_from_the_last() -> None:
    trace = SyntheticTrace(TRAFFIC, users=5, requests=60, seed=1)
    first, again = list(trace), list(trace)
    assert [each.prompt.tokens() for each in first] == [each.prompt.tokens() for each in again]
    assert [each.at for each in first] == sorted(each.at for each in first)
    assert [each.prompt.tokens() for each in first] != [each.prompt.tokens() for each in attrs.evolve(trace, seed=2)]
    said: dict[str, bytes] = {}
    followed = 0
    for each in first:
        before, prompt = said.get(each.session), each.prompt.tokens()
        followed += before is not None and bytes(prompt).startswith(before)
        assert each.whole is not None
        said[each.session] = bytes(each.whole.tokens())
    assert followed > 30


def test_options_of_a_component_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(Exception, match="options for other: this model has full, mamba"):
        Setup(HYBRID, memory="1MiB", options={"other": {"checkpoint_every": 4}}).compose()
