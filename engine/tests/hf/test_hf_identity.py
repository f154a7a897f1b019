"""Content depends on weights and adapters too: what changes them leads to another namespace, never to a wrong hit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from torch.nn.modules import module as torch_module
from torch.testing._internal.two_tensor import TwoTensor

from prefixloom import CompositionError, ProtocolError, compose
from prefixloom_engine import Engine, Request
from prefixloom_engine.contract import weights
from prefixloom_engine.contract.weights import SAMPLE, digest_of, sample
from prefixloom_engine.hf import HFModel, session
from tests.support.engines import nothing_left
from tests.support.hf_images import model_with_images
from tests.support.hf_models import model_of, prompt
from tests.support.hf_tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = prompt(1, 80)
IDS = torch.tensor([PROMPT])
CHANGED = "weights, adapters, hooks or mode have changed since this session"


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(model_of("llama"))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a device that is waited for had the weights."""
    monkeypatch.setattr(weights, "waits", lambda tensor: True)


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="adapters of transformers' models need it")


def cache_for(model: Any) -> Any:
    return compose(HFModel(model).config, capacity={"full": 512}, debug=True)


def generated(model: Any, cache: Any = None, **options: Any) -> list[int]:
    out = model.generate(
        IDS, past_key_values=cache, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones_like(IDS), **options,
    )  # fmt: skip
    found: list[int] = out[0].tolist()
    return found


def by_session(model: Any, cache: Any) -> tuple[int, list[int]]:
    with session(cache, model, IDS) as s:
        return s.ready, generated(model, s.cache)


def by_engine(model: Any, cache: Any) -> tuple[int, list[int]]:
    with Engine(HFModel(model), cache) as engine:
        (answer,) = engine.generate([Request(PROMPT, 12, stops=())])
    assert answer.error is None
    return answer.hit, PROMPT + answer.tokens


Way = Callable[[Any, Any], tuple[int, list[int]]]
EACH_WAY = pytest.mark.parametrize("way", [by_session, by_engine])
Undo = Callable[[], object]


# ---------------------------------------------------------------- what changes a model, each with what undoes it


def projection(model: Any) -> Any:
    return model.model.layers[1].self_attn.v_proj


def in_place(model: Any) -> Undo:
    with torch.no_grad():
        projection(model).weight.mul_(-1)
    return lambda: in_place(model)


def through_data(model: Any) -> Undo:
    projection(model).weight.data.mul_(-1)
    return lambda: through_data(model)


def other_data(model: Any) -> Undo:
    projection(model).weight.data = -projection(model).weight.data
    return lambda: other_data(model)


def other_parameter(model: Any) -> Undo:
    projection(model).weight = torch.nn.Parameter(-projection(model).weight.detach())
    return lambda: other_parameter(model)


def loaded(model: Any) -> Undo:
    model.load_state_dict({name: -each if "v_proj" in name else each for name, each in model.state_dict().items()})
    return lambda: loaded(model)


def hooked(model: Any) -> Undo:
    return projection(model).register_forward_hook(lambda module, args, output: output * 2).remove  # type: ignore[no-any-return]


def hooked_before(model: Any) -> Undo:
    return projection(model).register_forward_pre_hook(lambda module, args: (args[0] * 2,)).remove  # type: ignore[no-any-return]


def hooked_everywhere(model: Any) -> Undo:
    layer = projection(model)
    return torch_module.register_module_forward_hook(
        lambda module, args, output: output * 2 if module is layer else None
    ).remove


def hooked_before_everywhere(model: Any) -> Undo:
    layer = projection(model)
    return torch_module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if module is layer else None
    ).remove


def replaced(model: Any) -> Undo:
    layer = projection(model)
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)
    return lambda: delattr(layer, "forward")


def in_training(model: Any) -> Undo:
    model.train()
    return lambda: model.eval()


WEIGHTS = (in_place, through_data, other_data, other_parameter, loaded)
CODE = (hooked, hooked_before, hooked_everywhere, hooked_before_everywhere, replaced)
Change = Callable[[Any], Undo]


@pytest.fixture
def change(request: pytest.FixtureRequest) -> Any:
    """Makes the change that is the parameter. Whatever becomes of the test, it is undone."""
    undone: list[Undo] = []

    def made(model: Any) -> Undo:
        undone.append(request.param(model))
        return lambda: undone.pop()()

    yield made
    if request.param in CODE:
        while undone:
            undone.pop()()


def each_change(*changes: Change) -> Any:
    return pytest.mark.parametrize("change", changes, indirect=True, ids=lambda change: change.__name__)


@each_change(*WEIGHTS, *CODE)
@EACH_WAY
def test_a_changed_model_finds_its_own_and_the_same_again_what_it_had(
    way: Way, change: Change, model: Any, request: pytest.FixtureRequest
) -> None:
    """Of code nobody can tell that it is the same, on a copy of the model or later on."""
    cache, before = cache_for(model), generated(model)
    is_code = request.node.callspec.params["change"] in CODE
    assert way(model, cache) == (0, before)
    undo = change(model)
    after = generated(model)
    assert after != before
    assert [way(model, cache) for _ in range(2)] == [(0, after), (64, after)]
    if "everywhere" not in request.node.name:
        assert way(copy.deepcopy(model), cache)[0] == (0 if is_code else 64)
    undo()
    assert way(model, cache) == way(copy.deepcopy(model), cache) == (64, before)
    change(model)
    assert way(model, cache) == (0 if is_code else 64, after)
    nothing_left(cache)


@pytest.mark.usefixtures("far")
@each_change(through_data)
@EACH_WAY
def test_weights_of_a_device_that_change_through_their_data_are_noticed_at_the_next_request(
    way: Way, change: Change, model: Any, request: pytest.FixtureRequest
) -> None:
    test_a_changed_model_finds_its_own_and_the_same_again_what_it_had(way, change, model, request)


@pytest.mark.parametrize(
    ("change", "once"),
    [*((each, False) for each in (in_place, other_parameter, in_training, *CODE)), *((each, True) for each in CODE)],
    indirect=["change"],
)
def test_a_session_that_is_open_goes_on_with_no_other_model(change: Change, once: bool, model: Any) -> None:
    """``once``: the code is gone again when the pass has been computed."""
    cache, undo = cache_for(model), []
    if once:
        model.lm_head.register_forward_hook(lambda *_: undo.pop()() and None if undo else None)
    with pytest.raises(ProtocolError, match=CHANGED), session(cache, model, IDS) as s, torch.no_grad():
        model(IDS[:, :40], past_key_values=s.cache)
        undo.append(change(model))
        model(IDS[:, 40:], past_key_values=s.cache)
    while undo:
        undo.pop()()
    assert by_session(model, cache) == (0, generated(model))
    nothing_left(cache)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("when", ["opened", "computed"])
def test_a_session_keeps_nothing_if_weights_of_a_device_change_through_their_data_while_it_is_open(
    when: str, model: Any
) -> None:
    """As moving averages are swapped in; looked at in the first pass and at the end."""
    cache = cache_for(model)
    with pytest.raises(ProtocolError, match=CHANGED), session(cache, model, IDS) as s:
        if when == "computed":
            generated(model, s.cache)
        projection(model).weight.data.mul_(0.5)
        if when == "opened":
            generated(model, s.cache)
    projection(model).weight.data.mul_(2)
    assert by_session(model, cache) == (0, generated(model))
    nothing_left(cache)


def test_a_pass_of_other_weights_is_not_kept_though_its_error_is_caught(model: Any) -> None:
    cache = cache_for(model)
    with session(cache, model, IDS) as s, torch.no_grad():
        model(IDS[:, :40], past_key_values=s.cache)
        undo = in_place(model)
        with pytest.raises(ProtocolError, match=CHANGED):
            model(IDS[:, 40:], past_key_values=s.cache)
    undo()
    assert by_session(model, cache) == (32, generated(model))
    nothing_left(cache)


def test_a_change_is_noticed_by_each_that_runs_though_another_request_saw_it_first(model: Any) -> None:
    cache, served = cache_for(model), HFModel(model)
    with pytest.raises(ProtocolError, match=CHANGED), session(cache, served, IDS) as s, torch.no_grad():
        model(IDS[:, :40], past_key_values=s.cache)
        in_place(model)
        with session(cache, served, IDS) as other:
            assert generated(model, other.cache) == generated(model)
        model(IDS[:, 40:], past_key_values=s.cache)
    nothing_left(cache)


@pytest.mark.parametrize(
    ("steps", "overlap", "put"), [(1, True, in_place), (4, False, through_data), (4, True, in_place)]
)
def test_what_runs_in_an_engine_ends_when_the_weights_change(
    steps: int, overlap: bool, put: Change, model: Any
) -> None:
    """And a request that has not begun is served with the new ones."""
    cache = cache_for(model)
    with Engine(HFModel(model), cache, chunk=32, max_running=1, overlap=overlap) as engine:
        first, second = (engine.add(Request(PROMPT, 12, stops=())) for _ in range(2))
        for _ in range(steps):
            engine.step()
        undo = put(model)
        while engine.step():
            pass
        assert first.reason == "error" and "weights or adapters have changed" in str(first.error)
        assert PROMPT + second.tokens == generated(model)
    undo()
    assert by_engine(model, cache)[1] == generated(model)
    nothing_left(cache)


@pytest.mark.parametrize("places", ["near", "far"])
def test_a_change_that_no_sample_shows_is_noticed_when_it_is_said(
    places: str, model: Any, request: pytest.FixtureRequest
) -> None:
    """And by itself once a sample of another tensor shows that weights were written so."""
    if places == "far":
        request.getfixturevalue("far")
    cache, served, norm = cache_for(model), HFModel(model), model.model.norm.weight
    unseen = projection(model).weight.data.flatten()[1:9]  # of these 512 numbers, every ninth is in the sample
    before = generated(model)
    assert by_session(model, cache) == (0, before)
    unseen.mul_(-30)
    assert generated(model) != before and by_session(model, cache)[0] == 64
    served.weights_changed()
    assert by_session(model, cache) == (0, generated(model))
    unseen.mul_(2)
    norm.data.mul_(0.5)
    assert by_session(model, cache) == (0, generated(model))
    unseen.div_(-60)
    served.weights_changed()
    norm.data.mul_(2)
    assert by_session(model, cache) == (64, before)


@EACH_WAY
def test_a_config_that_changes_between_requests_is_noticed(way: Way, model: Any) -> None:
    """Code reads some of its fields in each pass: here, how large the embeddings are."""
    cache = cache_for(model)
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output * getattr(model.config, "embedding_multiplier", 1.0)
    )
    for factor, hit in ((1.0, 0), (3.0, 0), (1.0, 64), (3.0, 64)):
        model.config.embedding_multiplier = factor
        assert way(model, cache) == (hit, generated(model))


def test_a_model_is_copied_while_a_session_is_open_and_its_copy_is_no_part_of_it(model: Any) -> None:
    cache = cache_for(model)
    with session(cache, model, IDS) as s:
        twin = copy.deepcopy(model)
        with pytest.raises(ProtocolError, match="called outside of a pass"), torch.no_grad():
            twin(IDS, past_key_values=s.cache)
        right = generated(model, s.cache)
    in_place(twin)
    served = HFModel(model)
    in_place(copy.deepcopy(served).model)
    assert served.identity == HFModel(model).identity != copy.deepcopy(HFModel(twin)).identity
    assert generated(twin) != right == generated(model)
    assert by_session(twin, cache) == (0, generated(twin))
    assert by_session(model, cache) == (64, right)


# ---------------------------------------------------------------- adapters


def lora(peft: Any, *modules: str, **more: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=list(modules), init_lora_weights=False, lora_dropout=0.0, **more)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_for_one_call_is_refused_with_the_way_to_choose_it(peft: Any, model: Any) -> None:
    wrapped = peft.get_peft_model(model, lora(peft, "v_proj"), "first")
    wrapped.add_adapter("second", lora(peft, "v_proj"))
    model, cache = wrapped.eval().get_base_model(), cache_for(wrapped.get_base_model())
    right = generated(model)
    told = pytest.raises(ProtocolError, match=r"adapter_names=.*set_adapter")
    with told, session(cache, model, IDS) as s:
        generated(wrapped, s.cache, adapter_names=["second"])
    assert by_session(model, cache) == (0, generated(model))  # PEFT has left its hooks on the model
    for module in model.modules():
        module._forward_pre_hooks.clear()
    assert by_session(model, cache) == (0, right)
    wrapped.set_adapter("second")
    assert by_session(model, cache) == (0, generated(model))
    nothing_left(cache)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@EACH_WAY
def test_adapters_find_their_own(way: Way, peft: Any, model: Any) -> None:
    cache, seen = cache_for(model), []

    def check(hit: int) -> None:
        right = generated(model)
        assert way(model, cache) == (hit, right)
        assert hit or way(model, cache) == (64, right)
        seen.append(right)

    check(0)
    for name in ("a", "b"):
        torch.manual_seed(ord(name))
        model.add_adapter(lora(peft, "v_proj", "o_proj"), name)
    check(0)
    model.set_adapter("a")
    check(0)
    assert len(set(map(tuple, seen))) == 3
    layer = model.model.layers[0].self_attn.v_proj
    for choose, hit in (
        (lambda: model.set_adapter("b"), 64),
        (model.disable_adapters, 64),
        (lambda: (model.enable_adapters(), model.set_adapter("a")), 64),
        (lambda: layer.set_scale("a", 0.1), 0),
        (lambda: layer.set_scale("a", 1.0), 64),
        (lambda: layer.lora_B["a"].weight.data.mul_(3), 0),
        (lambda: layer.lora_B["b"].weight.data.mul_(3), 64),  # which is not active
    ):
        choose()
        check(hit)
    assert seen[3:6] == [seen[1], seen[0], seen[2]] and seen[7] == seen[2]
    nothing_left(cache)


def test_an_adapter_counts_with_its_config(peft: Any, model: Any) -> None:
    """The places and the scale of a Fourier adapter stand in its config alone."""

    def tuned(**options: Any) -> Any:
        torch.manual_seed(7)
        made = copy.deepcopy(model)
        fourier = peft.FourierFTConfig(n_frequency=10, target_modules=["v_proj"], init_weights=False, **options)
        made.add_adapter(fourier, "a")
        return made.eval()

    cache = cache_for(model)
    for options in ({"scaling": 300.0}, {"scaling": 900.0}, {"scaling": 300.0, "random_loc_seed": 5}):
        each = tuned(**options)
        assert by_session(each, cache) == (0, generated(each))
    again = tuned(scaling=300.0)
    assert by_session(again, cache) == (64, generated(again))


def test_an_adapter_of_a_parameter_is_refused_until_it_is_merged(peft: Any) -> None:
    model = tiny_model("mixtral")
    model.add_adapter(lora(peft, target_parameters=["mlp.experts.gate_up_proj"]), "a")
    model.eval()
    cache = compose(HFModel(model).config, memory="8MiB")
    with pytest.raises(CompositionError, match=r"model.layers.0.mlp.experts.*target_parameters.*merge\(\)"):
        by_session(model, cache)
    model.disable_adapters()
    assert by_session(model, cache) == (0, generated(model))
    model.enable_adapters()
    for module in model.modules():
        if hasattr(module, "parameter_name"):
            module.merge()
    assert by_session(model, cache) == (0, generated(model))


# ---------------------------------------------------------------- which tensors count


def test_buffers_that_are_not_saved_count(model: Any) -> None:
    """A cast to 16 bits and back rounds the frequencies of rotary embeddings, and no weight that was in 16 bits."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for each in (*model.parameters(), *twin.parameters()):
            each.copy_(each.bfloat16())
    twin.bfloat16().double()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    cache = cache_for(model)
    for each in (model, twin, model, twin):
        ready, _ = by_session(each, cache)
    assert ready == 64 and HFModel(model).identity != HFModel(twin).identity
    for each in model.model.rotary_emb.buffers():
        each.mul_(0.5)
        assert by_session(model, cache) == (0, generated(model))


@pytest.mark.parametrize("name", ["ctrl", "xglm", "llama"])
def test_buffers_that_a_models_own_code_replaces_end_nothing(name: str) -> None:
    """CTRL moves its table of sines in each pass, XGLM makes a longer one, and dynamic frequencies are made anew."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    options: dict[str, Any] = {"rope_parameters": dynamic} if name == "llama" else {}
    model = tiny_model(name, max_position_embeddings=96, **options) if name != "ctrl" else tiny_model(name)
    cache = compose(HFModel(model).config, memory="8MiB")
    before = HFModel(model).identity
    with torch.no_grad():
        model(torch.tensor([prompt(2, 128)]))
    assert HFModel(model).identity == before
    assert by_session(model, cache) == (0, generated(model))
    assert by_session(model, cache)[0] == 64


class Hidden(torch.nn.Module):
    """Keeps its weight as the quantized modules of torch.ao do: in the state that it saves, and in no parameter."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.packed = (weight,)

    def get_extra_state(self) -> Any:
        return self.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed[0].T


def test_weights_that_nobody_sees_are_refused(model: Any) -> None:
    cache, layer, kept = cache_for(model), model.model.layers[1].self_attn, projection(model)
    for unseen, told in (
        (torch.nn.Linear(1, 1).to("meta"), "on the meta device"),
        (Hidden(kept.weight.detach()), r"'model.layers.1.self_attn.v_proj' of LlamaForCausalLM is a Hidden"),
    ):
        layer.v_proj = unseen
        with pytest.raises(CompositionError, match=told):
            by_session(model, cache)
    layer.v_proj = kept
    assert by_session(model, cache) == (0, generated(model))


class Scaled(TwoTensor):  # type: ignore[misc]
    """Says something of itself beside the tensors that it is made of."""

    scale = 1.0

    def __tensor_flatten__(self) -> Any:
        names, more = super().__tensor_flatten__()
        return names, (more, self.scale)


def test_weights_made_of_other_tensors_count_by_these_and_by_what_they_say_beside(model: Any) -> None:
    """As those of quantized models are, whose outer tensor has no memory of its own."""
    cache, layer, hits = cache_for(model), projection(model), []
    kept = layer.weight.detach()
    layer.weight = torch.nn.Parameter(TwoTensor(2 * kept, 2 * kept), requires_grad=False)
    served = HFModel(model)
    before = served.identity
    for written in (layer.weight.a, layer.weight.b.data):
        written.mul_(3)
        assert served.changed() and served.identity != before
        before = served.identity
    for sign in (1, -1, 1):
        layer.weight = torch.nn.Parameter(TwoTensor(sign * kept, sign * kept), requires_grad=False)
        with session(cache, model, IDS) as s, torch.no_grad():
            model(IDS[:, s.ready :], past_key_values=s.cache)
        hits.append(s.ready)
    assert hits == [0, 0, 64]
    digests = []
    for scale in (1.0, 2.0, 1.0):
        weight = Scaled(torch.ones(3), torch.zeros(3))
        weight.scale = scale
        digests.append(digest_of(weight))
    assert digests[0] == digests[2] != digests[1]


def test_a_sample_has_numbers_of_its_tensor_alone_in_whatever_order_they_lie() -> None:
    whole = torch.zeros(8, 8)
    row, column = sample(whole[0]).clone(), sample(whole[:, 0]).clone()
    whole[1:, 1:] += 1
    assert torch.equal(sample(whole[0]), row)
    whole[0, 1:] += 1
    assert not torch.equal(sample(whole[0]), row)
    assert torch.equal(sample(whole[:, 0]), column)
    block = torch.arange(2.0 * 300 * 5).reshape(2, 300, 5)
    for order in itertools.permutations(range(3)):
        found = sample(block.permute(order))
        assert SAMPLE <= len(found) <= SAMPLE + 2 and found[-1] > 2900
    assert len(sample(block[:, ::2])) == len(sample(block[:, :1].expand(2, 300, 5))) == 0


def test_kernels_of_a_part_count() -> None:
    model = copy.deepcopy(model_with_images("llava"))
    served = HFModel(model)
    before = served.identity
    model.set_attn_implementation({"vision_config": "eager"})
    assert served.changed() and served.identity != before


@pytest.mark.parametrize("part", ["model", "dropout", "attention", "router"])
def test_training_is_refused(part: str, model: Any) -> None:
    cache, layer = cache_for(model), model.model.layers[0]
    if part == "dropout":
        layer.mlp.drop = torch.nn.Dropout(0.5)
    elif part == "attention":
        layer.self_attn.train().attention_dropout = 0.5
    elif part == "router":  # such a number adds noise to the inputs of a mixture of experts
        layer.mlp.train().jitter_noise = 0.1
    else:
        model.train()
    with pytest.raises(CompositionError, match="in training mode"):
        by_session(model, cache)
    model.eval()
    assert by_session(model, cache) == (0, generated(model))
