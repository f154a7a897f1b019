"""Laws of what a component states about itself: identity, manifest and pool. They need no traffic."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ...contract.manifest import Buffer
from ..kit.bench import Bench, composed_as_it_is
from ..kit.case import ComponentCase, LawBroken, NotApplicable, Wasteful, made
from ..kit.machines import Machine, on_machine

NARROWING = {"create_match_validator", "commit_insert"}
"""Hooks by which a component may leave out boundaries itself, in place of a grid in its manifest."""


def law_each_component_is_an_instance_of_its_own(case: ComponentCase) -> None:
    """Each call of ``make`` returns a new component, which equals only itself and keeps its name and manifest.

    Clauses: C1, C2, C3, C4, O6.
    """
    one = made(case)
    with on_machine(Machine(case.seed)):
        other = made(case)
    if one is other:
        raise LawBroken(
            "make() returned the same instance twice: two caches would share it. Return a new one each time"
        )
    if getattr(type(one), "__eq__", None) is not object.__eq__:
        raise LawBroken(f"{type(one).__name__} compares by value. Make the class with eq=False, or without __eq__")
    for component in (one, other):
        if not component.name or component.name != one.name:
            raise LawBroken(f"the names differ or are empty: {one.name!r} and {other.name!r}")
        if component.manifest != component.manifest:
            raise LawBroken("asked twice, the manifest is not the same: it never changes once the component is made")
        mine, first = (attrs.evolve(each.manifest, admission=None) for each in (component, one))
        if mine != first:  # two policies made of functions are never equal
            raise LawBroken(f"two components that make() returned have two manifests: {first} and {mine}")


def law_a_cache_can_be_composed_of_it(case: ComponentCase) -> None:
    """A cache can be composed with the component.

    Clauses: C6, M12, R10, R15.
    """
    composed_as_it_is(case)  # what is impossible is refused, with the reason
    Bench(case)


def law_the_manifest_has_all_that_the_layers_write(case: ComponentCase) -> None:
    """The manifest has what the layers write: every buffer with its shape, dtype, layers and sharers, and its entries.

    Clauses: M1, M2, M9.
    """
    truth, manifest = case.truth, case.manifest
    if truth.buffers is None and truth.tokens_per_entry is None and truth.at_rest is None:
        raise NotApplicable("nobody said what its layers write (Truth.buffers, tokens_per_entry, at_rest)")
    declared = {buffer.name: buffer for buffer in manifest.buffers}
    for written in truth.buffers or ():
        if written.name not in declared:
            raise LawBroken(f"the layers write {written.name}, and the manifest has no such buffer: it is lost")
        _same_buffer(declared.pop(written.name), written)
    if truth.tokens_per_entry is not None and manifest.tokens_per_slot != truth.tokens_per_entry:
        raise LawBroken(
            f"an entry stands for {truth.tokens_per_entry} tokens, and tokens_per_slot says {manifest.tokens_per_slot}"
        )
    if truth.at_rest is not None and manifest.stored_as is not None and manifest.stored_as.tolerance > truth.at_rest:
        raise LawBroken(
            f"cached content may differ by {manifest.stored_as.tolerance:g} (stored_as), and the layers bear "
            f"{truth.at_rest:g}"
        )
    if truth.buffers is not None and declared:
        raise Wasteful(f"no layer writes {', '.join(sorted(declared))}: {_bytes(declared.values())} bytes an entry")


def _bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.entry_bytes for buffer in buffers)


def _same_buffer(declared: Buffer, written: Buffer) -> None:
    name = f"buffer {written.name!r}"
    without = sorted(set(written.layers) - set(declared.layers))
    if without:
        raise LawBroken(f"{name} has no entries for the layers {without}, which write their own")
    idle = sorted(set(declared.layers) - set(written.layers))
    if idle:
        raise LawBroken(
            f"{name} has entries for the layers {idle}, which write none: what is read there is not written"
        )
    for what in ("shape", "dtype"):
        mine, theirs = getattr(declared, what), getattr(written, what)
        if mine != theirs:
            raise LawBroken(f"{name} is of {what} {mine} in the manifest, and the layers write {what} {theirs}")
    if dict(declared.shared) != dict(written.shared):
        raise LawBroken(
            f"{name}: the layers read the entries of others as {dict(written.shared)} (reader: owner), and the "
            f"manifest says {dict(declared.shared)}"
        )


def law_the_manifest_says_what_content_depends_on(case: ComponentCase) -> None:
    """Content depends on no more later tokens than ``lookahead`` says, and is exact wherever ``grid`` says so.

    Clauses: M4, M5.
    """
    truth, manifest = case.truth, case.manifest
    ahead, grid = truth.ahead, truth.grid
    if ahead is None and grid is None:
        raise NotApplicable("nobody said what content depends on (Truth.ahead, grid)")
    if ahead is not None and manifest.lookahead < ahead:
        raise LawBroken(
            f"the entry of a token depends on {_tokens(ahead)} after it, and the manifest says lookahead="
            f"{manifest.lookahead}: a prompt that goes on with other tokens would be given this entry"
        )
    if grid is not None and manifest.grid % grid and not NARROWING & set(Bench(case).spy.overridden):
        raise LawBroken(
            f"content is exact at multiples of {grid} only, and the manifest says grid={manifest.grid}: it would "
            f"depend on how a prompt was cut into steps"
        )
    if ahead is not None and manifest.lookahead > ahead:
        raise Wasteful(
            f"the manifest says lookahead={manifest.lookahead}, and content depends on {_tokens(ahead)} after it: "
            f"every hit ends {_tokens(manifest.lookahead - ahead)} before it could"
        )
    if grid is not None and manifest.grid > grid:
        raise Wasteful(
            f"the manifest says grid={manifest.grid}, and content is exact at every multiple of {grid}: a hit ends up "
            f"to {_tokens(manifest.grid - grid)} before it could"
        )


def _tokens(count: int) -> str:
    return f"{count} token" + "s" * (count != 1)


def law_the_pool_has_the_shape_of_the_manifest(case: ComponentCase) -> None:
    """A pool has a tensor for every buffer: layers, slots, the entries of a page, and the shape of one.

    Clauses: P1, M1, M2, M3, C5.
    """
    bench = Bench(case, whole=True)
    part, pool = bench.parts[0], bench.cache.pool(bench.parts[0].name)
    middle = (part.page_tokens // part.manifest.tokens_per_slot,) if part.page_tokens else ()
    for buffer in part.manifest.buffers:
        tensor = pool.buffers[buffer.name]
        wanted = (len(buffer.layers), pool.capacity, *middle, *buffer.shape)
        if tuple(tensor.shape) != wanted or str(tensor.dtype) != f"torch.{buffer.dtype}":
            raise LawBroken(f"buffer {buffer.name!r} is {tuple(tensor.shape)} of {tensor.dtype}, not {wanted}")
    component = bench.spy.original
    if hasattr(component, "pool") and component.pool is not pool:
        raise LawBroken("its attribute pool is not the pool that it was given: its hooks and ops would touch another")
