"""Moving slots between two pools' buffers: bitwise what a loop does, whatever the layouts, on every path."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixloom import InputError
from prefixloom.device import kernels
from prefixloom.device.kernels import move_slots
from tests.support.content import Made, bits, noise, on_gpu, pinned
from tests.support.interpreter import INTERPRETED, pass_interpreted

DTYPES = [
    torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float16, torch.bool, torch.complex64, torch.uint8,
    torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES = [(), (1,), (3,), (4,), (2, 5), (16,), (3, 2, 7)]

pytestmark = pytest.mark.usefixtures("one_thread")


def with_triton(source: list[Tensor], src: Sequence[int], target: list[Tensor], dst: Sequence[int]) -> None:
    from prefixloom.device import kernels_triton

    if src:
        pairs = [kernels.words(*pair) for pair in zip(source, target, strict=True)]
        kernels_triton.move(pairs, torch.tensor(src), torch.tensor(dst))


PATHS: dict[str, tuple[Callable[..., None] | None, dict[str, Any]]] = {
    "as it comes": (None, {}),
}
if INTERPRETED:
    PATHS["triton"] = (with_triton, {})
    PATHS["triton in small blocks"] = (with_triton, {"BLOCK": 4})
PLACES = (
    {"to a GPU": (pinned, on_gpu), "from a GPU": (on_gpu, pinned)}
    if torch.cuda.is_available() and not INTERPRETED
    else {}
)
"""Where the two sides of a move lie. The tests make a source, then its target."""
for across in PLACES:
    PATHS[across] = (None, {})
    PATHS[f"{across}, in small blocks"] = (None, {"BLOCK": 4})


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways across to a device are the same on a CPU, but for the waiting."""
    move, settings = PATHS[request.param]
    here = sys.modules[__name__]
    if move is not None:
        monkeypatch.setattr(here, "move_slots", move)
    for name, value in settings.items():
        module: Any = kernels
        if name == "BLOCK":
            from prefixloom.device import kernels_triton as module
        monkeypatch.setattr(module, name, value)
    places = PLACES.get(request.param.partition(",")[0])
    if places is not None:
        turn = cycle(places)
        monkeypatch.setattr(here, "noise", lambda *asked: next(turn)(*asked))
        monkeypatch.setattr(here, "move_slots", moved_and_over)
    return str(request.param)


def moved_and_over(*asked: Any) -> None:
    """A copy between a GPU and the host goes on when the call has returned."""
    move_of_the_core(*asked)
    torch.cuda.synchronize()


move_of_the_core = move_slots


def page_first(capacity: int, layers: int, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """All layers of a slot together, and before and behind them (sometimes) the room of another buffer's."""
    before, behind = seed % 2, seed % 3
    whole = noise((capacity, before + layers + behind, *shape), dtype, seed)
    return whole[:, before : before + layers].transpose(0, 1)


def some_pairs(choice: random.Random, capacities: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """One to four buffers, at any place of their memory; two of one shape are there more often than not.

    Either side may be page-first.
    """
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for _ in range(choice.randrange(1, 4)):
        layers, shape, dtype = choice.randrange(1, 4), choice.choice(SHAPES), choice.choice(DTYPES)
        kinds = [choice.random() < 0.5 for _ in sides]
        for _ in range(choice.choice((1, 2))):
            for side, capacity, paged in zip(sides, capacities, kinds, strict=True):
                seed = choice.randrange(1 << 30)
                if paged:
                    side.append(page_first(capacity, layers, shape, dtype, seed))
                    continue
                whole, at = (layers, capacity, *shape), seed % 9
                side.append(noise((at + prod(whole),), dtype, seed)[at:].view(whole))
    return sides


def some_slots(choice: random.Random, capacity: int, count: int) -> list[int]:
    """Different ones, often in runs."""
    slots: list[int] = []
    free = list(range(capacity))
    while len(slots) < count:
        at, run = choice.randrange(len(free)), choice.choice((1, 1, 2, 5))
        slots += (taken := free[at : at + run][: count - len(slots)])
        del free[at : at + len(taken)]
    return slots


def check(source: list[Tensor], src: list[int], target: list[Tensor], dst: list[int]) -> None:
    before = [tensor.clone() for tensor in source]
    wanted = [tensor.clone() for tensor in target]
    for w, s in zip(wanted, source, strict=True):
        for p, d in zip(src, dst, strict=True):
            w[:, d] = s[:, p]
    move_slots(source, src, target, dst)
    for found, right in zip([*source, *target], [*before, *wanted], strict=True):
        assert torch.equal(bits(found), bits(right)), (src, dst, found.shape, found.stride(), found.dtype)


CASES = 20 if INTERPRETED else 100


def test_a_move_is_bitwise_what_a_loop_does(path: str) -> None:
    for seed in range(CASES):
        choice = random.Random(seed)
        capacities = choice.choice((1, 2, 9, 40)), choice.choice((1, 3, 9, 40))
        count = choice.randrange(min(capacities) + 1)
        source, target = some_pairs(choice, capacities)
        src, dst = (some_slots(choice, capacity, count) for capacity in capacities)
        if choice.random() < 0.2 and src:
            src = [choice.choice(src) for _ in src]  # one source, several destinations
        check(source, src, target, dst)


def test_a_move_and_back_leaves_what_was_there(path: str) -> None:
    for seed in range(CASES // 4):
        choice = random.Random(seed)
        source, target = some_pairs(choice, (20, 30))
        before = [tensor.clone() for tensor in source]
        src, dst = some_slots(choice, 20, 12), some_slots(choice, 30, 12)
        move_slots(source, src, target, dst)
        for tensor in source:
            for slot in src:
                tensor[:, slot] = 0
        assert not all(torch.equal(bits(s), bits(b)) for s, b in zip(source, before, strict=True))
        move_slots(target, dst, source, src)
        assert all(torch.equal(bits(s), bits(b)) for s, b in zip(source, before, strict=True))


def test_runs_are_where_both_sides_go_on_by_one() -> None:
    assert kernels._runs([1, 2, 3, 5, 6, 8], [4, 5, 6, 7, 9, 10]) == [
        (1, 4, 3), (5, 7, 1), (6, 9, 1), (8, 10, 1),
    ]  # fmt: skip
    assert kernels._runs([2, 1, 0, 9], [6, 5, 4, 7]) == [(0, 4, 3), (9, 7, 1)]
    assert kernels._runs([2, 1, 0], [4, 5, 6]) == [(2, 4, 1), (1, 5, 1), (0, 6, 1)]


# ---------------------------------------------------------------- what is refused, before anything changes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"src": [0, -1]}, "slot -1 does not exist: there are 4"),
        ({"src": [0, 4]}, "slot 4 does not exist: there are 4"),
        ({"dst": [6, 1]}, "slot 6 does not exist: there are 6"),
        ({"dst": [-1, 1]}, "slot -1 does not exist: there are 6"),
        ({"dst": [1, 1]}, "written twice"),
        ({"dst": [1]}, "differ in number: 1 and 1 tensors, 2 and 1 slots"),
        ({"target": []}, "differ in number: 1 and 0 tensors"),
        ({"target": [torch.zeros(2, 6, 3, dtype=torch.int32)]}, "slots of torch.float32"),
        ({"target": [torch.zeros(2, 6, 4)]}, "cannot be moved into"),
        ({"target": [torch.zeros(3, 6, 3)]}, "cannot be moved into"),
        ({"target": [torch.zeros(2, 6, 6)[:, :, ::2]]}, "must be contiguous"),
        ({"source": [torch.zeros(3)], "target": [torch.zeros(3)]}, "cannot be moved into"),
    ],
    ids=str,
)
def test_what_cannot_be_moved_is_refused(change: dict[str, Any], reason: str) -> None:
    given = {"source": [noise((2, 4, 3), torch.float32, 1)], "src": [0, 1], "dst": [2, 3]}
    given |= {"target": [noise((2, 6, 3), torch.float32, 2)], **change}
    before = [tensor.clone() for tensor in (*given["source"], *given["target"])]  # type: ignore[misc]
    with pytest.raises(InputError, match=reason):
        move_slots(**given)  # type: ignore[arg-type]
    after = [*given["source"], *given["target"]]  # type: ignore[misc]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(after, before, strict=True))


def test_a_move_within_one_memory_is_refused() -> None:
    whole = noise((2, 8, 3), torch.float32, 1)
    with pytest.raises(InputError, match="use copy_slots"):
        move_slots([whole[:, :4]], [0], [whole[:, 4:]], [0])


def test_tensors_without_content_and_no_slots_are_nothing_to_do() -> None:
    meta, here = torch.empty((2, 4, 3), device="meta"), noise((2, 4, 3), torch.float32, 1)
    before = here.clone()
    move_slots([meta], [0], [here], [1])
    move_slots([here], [0], [meta], [1])
    move_slots([], [0], [], [1])
    move_slots([here.clone()], [], [here], [])
    assert torch.equal(here, before)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("alike", [False, True], ids=["scattered", "alike"])
def test_no_temporary_grows_with_what_is_moved(paged: bool, alike: bool) -> None:
    source = [torch.zeros((4, 1024, 2048), dtype=torch.uint8)]
    made = torch.zeros((1024, 4, 2048), dtype=torch.uint8).transpose(0, 1)
    target = [made if paged else source[0].clone()]
    src = list(range(1024))
    dst = src if alike else random.Random(1).sample(src, 1024)
    for call in (lambda: move_slots(source, src, target, dst), lambda: move_slots(target, dst, source, src)):
        with Made() as seen:
            call()
        assert max(seen.sizes, default=0) <= 8 * 1024


# ---------------------------------------------------------------- triton


@pytest.mark.skipif(INTERPRETED, reason="this is that run")
def test_the_kernel_for_triton_does_the_same_in_its_interpreter() -> None:
    pass_interpreted(__file__, "triton and not kernel_for")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("ones", [False, True], ids=["numbers", "ones"])
def test_the_kernel_for_triton_compiles_for_a_gpu_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ones: bool
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nobody chooses; no kernel adds floats
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.backends.compiler")
    from prefixloom.device import kernels_triton

    kernel = kernels_triton._move
    for word in kernels_triton.WORDS.values():
        types = {name: "constexpr" if name.isupper() else "i32" for name in kernel.arg_names}
        types |= dict.fromkeys(("sources", "targets", "src", "dst"), "*i64") | {"target_slot": "i64"}
        constants = {"WORD": word, "BLOCK": kernels_triton.BLOCK}
        if ones:
            alike = ("layers", "chunks", "words", "source_slot")  # a launch does not look at the others
            types |= dict.fromkeys(alike, "constexpr")
            constants |= dict.fromkeys(alike, 1)
        source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants)
        made = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32))
        assert "st.global" in made.asm["ptx"]
