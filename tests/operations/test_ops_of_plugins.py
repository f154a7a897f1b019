"""Ops that plugins answer with: an op writes what its own sequence owns of its own component, and nothing else."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from prefixloom import (
    Claim,
    Component,
    InvariantError,
    Op,
    Path,
    PluginError,
    Point,
    ProtocolError,
    Reach,
    Window,
    hookimpl,
)
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.tree.lane import PageLane
from tests.support.helpers import Blocks, cache_of, part, run, serve, settle

KINDS = ("clear", "copy", "track", "write")
REACHES = {"path": Path, "window": lambda: Window(10), "blocks": lambda: Blocks(8), "state": Point}


class Asking(Component):
    """Answers with the ops that a test wrote down."""

    pool: Any = None
    added: tuple[Op, ...] = ()
    claimed: tuple[Op, ...] = ()

    @hookimpl
    def deferred_forward_ops(self) -> tuple[Op, ...]:
        return self.added

    @hookimpl
    def finalize_match_result(self) -> Claim:
        return Claim(ops=self.claimed)

    @hookimpl
    def run_forward_op(self, op: Op) -> None:
        self.pool.buffers["data"][:, list(op.dst)] = -1


def asking(reach: Reach) -> Asking:
    more = {"max_rewind": 2} if reach.unit == "boundary" else {}
    mine = part("mine", reach, kind=Asking, **more)
    assert isinstance(mine, Asking)
    return mine


def contents(cache: Cache) -> dict[str, list[list[int]]]:
    """What each slot of each component holds."""
    pools = [cache.pool(each.name).buffers["data"] for each in cache.composition.parts]
    return {
        each.name: data.transpose(0, 1).flatten(1).tolist()
        for each, data in zip(cache.composition.parts, pools, strict=True)
    }


def fill_slots(cache: Cache, chance: random.Random) -> None:
    """Give every slot content that no other has."""
    for each in cache.composition.parts:
        data = cache.pool(each.name).buffers["data"]
        data.copy_(torch.arange(data.numel()).reshape(data.shape) + chance.randrange(1, 1 << 40))


def slot_of(sequence: Sequence, place: int, own: bool) -> int | None:
    """The slot that a place stands for, by the public verbs; None if the sequence may not name it."""
    slots = [*sequence.pages("mine"), *sequence.rewind_slots("mine")]
    if sequence.core.shape.lane("mine").unit == "boundary":
        return slots[place] if place < len(slots) else None
    page = place // 4
    if page >= len(slots) or slots[page] < 0 or (own and place // 4 * 4 < sequence.published):
        return None
    return slots[page]


def some_op(chance: random.Random, sequences: int) -> Op:
    """An op as an author may write it, right or wrong. ``sequences``: 0 for a claim."""
    kind, count = chance.choice(KINDS), chance.randrange(1, 3)
    dst, src = (tuple(chance.choices((0, 1, 2, 3, 9, 14, 18, 22, 26, 40), k=count)) for _ in range(2))
    named = {"sequence": chance.randrange(sequences)} if sequences else {}
    return Op(kind, "mine", dst=dst, src=src if kind in ("copy", "track") else (), **named)


def expected(op: Op, sequence: Sequence, before: list[list[int]]) -> dict[int, list[int]] | None:
    """Slots and what the op leaves in them; None if it names what it must not."""
    dst = [slot_of(sequence, place, True) for place in op.dst]
    src = [slot_of(sequence, place, False) for place in op.src]
    if None in dst or None in src:
        return None
    made = {"clear": [0, 0], "write": [-1, -1]}.get(op.kind)
    return {slot: before[src[at] or 0] if made is None else made * (len(before[0]) // 2) for at, slot in enumerate(dst)}  # type: ignore[misc]


@pytest.mark.parametrize("claim", [False, True], ids=["added", "claimed"])
@pytest.mark.parametrize("reach", REACHES)
def test_op_of_a_plugin_writes_what_its_sequence_owns_or_is_refused(reach: str, claim: bool) -> None:
    chance, counts = random.Random(f"{reach} {claim}"), {"ran": 0, "refused": 0}
    for _ in range(20):
        mine = asking(REACHES[reach]())
        state = part("state", Point(), max_rewind=2)
        cache = cache_of(part("path", Path()), mine, state, tokens=96, slots=20, max_rewind=2)
        for seed in range(3):
            serve(cache, [*range(12), *range(100 * seed, 100 * seed + 12)], chunk=8)
        batch = [cache.open([*range(16), 1, 2]), cache.open([7] * 30)]
        for sequence in batch:
            run(sequence, chance.randrange(1, sequence.named - sequence.reserved + 1))
            if chance.random() < 0.5:
                sequence.publish()
            run(sequence, 0)  # so that no running state is still to be filled
            sequence.grow(sequence.named - sequence.reserved)
        op = some_op(chance, 0 if claim else 2)
        if claim:
            mine.claimed = (op,)
            batch.append(cache.open([*range(12), 3, 4, 5, 6, 7]))
            mine.claimed = ()
            batch[2].grow(5)
        mine.added = () if claim else (op,)
        whose = batch[2 if claim else op.sequence or 0]
        fill_slots(cache, chance)
        before = contents(cache)
        wanted = expected(op, whose, before["mine"])
        try:
            with cache.step(batch) as step:
                step.run_ops()
        except PluginError as error:
            assert wanted is None, str(error)
            counts["refused"] += 1
        else:
            assert wanted is not None, f"{op} ran"
            counts["ran"] += 1
        wanted = wanted or {}
        for name, now in contents(cache).items():
            changed = {slot for slot in range(len(now)) if now[slot] != before[name][slot]}
            filled = {whose.pages(name)[0]} if claim and cache.core.shape.lane(name).unit == "boundary" else set()
            assert changed - filled <= (wanted.keys() if name == "mine" else set()), f"{op} wrote {changed} of {name}"
            if name == "mine" and not filled:
                assert {slot: now[slot] for slot in wanted} == wanted
        mine.added = ()
        for sequence in batch:
            sequence.abort()
        settle(cache)
    assert min(counts.values()) > 1, counts


@pytest.mark.parametrize("change", ["published", "rewound", "aborted"])
@pytest.mark.parametrize("after", [False, True])
def test_op_does_not_run_when_its_place_has_another_owner_by_then(change: str, after: bool) -> None:
    mine = asking(Path())
    cache = cache_of(mine)
    data = cache.pool("mine").buffers["data"]
    with cache.open(range(20)) as sequence, cache.open([7] * 8) as other:
        run(sequence, 10)
        sequence.grow(10)
        other.grow(8)
        slots = sequence.pages("mine")
        mine.added = (Op("clear", "mine", sequence=0, dst=(0,) if change == "published" else (19,), after=after),)
        data.fill_(5)
        changed = {"published": sequence.publish, "rewound": lambda: sequence.rewind(4), "aborted": sequence.abort}
        step = cache.step([sequence, other])
        try:
            with step:
                if after:
                    step.run_ops()
                changed[change]()
                if not after:
                    step.run_ops()
        except PluginError as error:
            assert "names place" in str(error) and change != "aborted"
            assert other.committed == 0
        else:
            assert change == "aborted" and other.committed == 8, "the step goes on for the others"
        assert (data[:, slots] == 5).all()
        mine.added = ()
        sequence.abort()
    settle(cache)


@pytest.mark.parametrize(
    "op",
    [
        Op("clear", "mine", dst=(0,)), Op("clear", "mine", dst=(0,), sequence=1), Op("clear", "mine", sequence=-1),
        Op("clear", "path", dst=(0,), sequence=0), Op("write", "mine", dst=(0,)), Op("write", "mine", src=(0,)),
        Op("write", "mine", dst=(-1,), sequence=0), Op("write", "mine", dst=("0",), sequence=0),  # type: ignore[arg-type]
        Op("write", "mine", sequence=True), Op("write", "mine", dst=[0], sequence=0),  # type: ignore[arg-type]
    ],
    ids=repr,
)  # fmt: skip
def test_op_that_names_slots_or_a_sequence_or_component_that_is_not_its_own_is_refused(op: Op) -> None:
    mine = asking(Path())
    cache = cache_of(part("path", Path()), mine)
    serve(cache, range(256))  # every slot has an owner
    before = contents(cache)
    refused = pytest.raises(PluginError, match="'mine': finalize_match_result must answer")
    mine.claimed = (op,)
    with refused if op.sequence is not None or op.component != "mine" else nullcontext():
        cache.open([1] * 8).abort()
    mine.claimed, mine.added = (), (op,)
    with cache.open([1] * 8) as sequence:
        sequence.grow(8)
        with pytest.raises(PluginError, match="'mine': deferred_forward_ops must answer"):
            cache.step([sequence])
        mine.added = ()
        assert contents(cache) == before


def test_op_may_name_a_slot_that_its_component_minted_and_no_other_span() -> None:
    mine = asking(Point())
    cache = cache_of(part("path", Path()), mine)
    one, other, wide = mine.pool.mint(1), cache.pool("path").mint(1), mine.pool.mint(2)
    (slot,) = one.ids
    data = mine.pool.buffers["data"]
    with cache.open(range(8)) as sequence:
        run(sequence, 4)
        (running,) = sequence.pages("mine")
        data[:, running] = 6
        mine.added = (Op("copy", "mine", dst=(one,), src=(0,), sequence=0), Op("write", "mine", dst=(0,), sequence=0))
        run(sequence, 4)
        assert (data[0, slot].tolist(), data[0, running].tolist()) == ([6, 6], [-1, -1])
        mine.added = (Op("clear", "mine", dst=(one,)),)
        run(sequence, 0)
        assert data[0, slot].tolist() == [0, 0]
        for wrong in (other, wide):
            mine.added = (Op("clear", "mine", dst=(wrong,)),)
            with pytest.raises(PluginError, match="an op names place <PageSpan of"):
                run(sequence, 0)
        one.free()
        mine.added = (Op("clear", "mine", dst=(one,)),)
        with pytest.raises(ProtocolError, match="after it was freed"):
            run(sequence, 0)
        mine.added = ()
    other.free()
    wide.free()
    settle(cache)


def test_debug_mode_refuses_an_op_that_is_about_to_write_a_slot_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core gives an op what its sequence only reads: the mistake is made here."""
    honest = PageLane.slot_at
    monkeypatch.setattr(PageLane, "slot_at", lambda *told: honest(*told[:3], False))
    mine = asking(Path())
    cache = cache_of(mine)
    serve(cache, range(8))
    mine.added = (Op("clear", "mine", dst=(0,), sequence=0),)
    data = cache.pool("mine").buffers["data"].fill_(5)
    with cache.open(range(12)) as sequence:
        sequence.grow(4)
        step = cache.step([sequence])
        with (
            pytest.raises(InvariantError, match="clear of mine writes slot 62 of pool 'mine', which is PUBLISHED"),
            step,
        ):
            step.run_ops()
        assert (data == 5).all()
        sequence.abort()
