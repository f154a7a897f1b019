"""``session``: one conversation of a transformers model, computed by its own ``generate``, over a composed cache.

    with cache.session(model, ids) as s:  # or session(cache, model, ids)
        out = model.generate(ids, past_key_values=s.cache)

What hit, on the device or on a tier below, is not computed again; what was computed is published at the end. While the
session is open, a pair of hooks on the model sees each of its forward passes over ``s.cache``, and takes slots and
commits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from prefixloom import Cache, InputError, ProtocolError, Sequence

from ..model import Batch, Span
from .cache import PooledCache
from .model import HFModel
from .rows import Rows

PLAIN = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep"})
"""Tensors that a forward pass may be given: what a token is remembered as does not depend on them."""


class Session:
    """Made by ``session``; a context manager; single use.

    ``cache``     what to give to ``generate``, or to the model, as ``past_key_values``
    ``ready``     how many tokens of the prompt hit, once it is entered
    ``sequence``  the cache's own view of it
    """

    cache: PooledCache
    sequence: Sequence
    ready: int

    def __init__(self, cache: Cache, model: Any, ids: Any, *, namespace: str, label: str, chunk: int | None) -> None:
        self._hf = model if isinstance(model, HFModel) else HFModel(model)
        self._runner = self._hf.bind(cache)
        self._pool = cache
        self._ids = _tokens(ids)
        if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
            raise InputError(f"chunk takes a number of tokens from 1 up, got {chunk!r}")
        self._prompt = len(self._ids)
        self._chunk = chunk
        self._namespace, self._label = namespace, label
        self._page = cache.composition.page
        states = [part.manifest for part in cache.composition.parts if not part.page_tokens]
        self._stated = bool(states)
        self._every_boundary = any(not manifest.checkpoint_every for manifest in states)
        self._hooks: list[Any] = []
        self._step: Any = None
        self._rows: Rows | None = None
        self._used = False
        self.cache = self._runner.pooled

    # ------------------------------------------------------------ with
    def __enter__(self) -> Session:
        if self._used:
            raise ProtocolError("a session is used once: open another one")
        self._used = True
        self.sequence = self._pool.open(self._ids, leave=1, namespace=self._namespace, label=self._label)
        try:
            self.sequence.restore()
            self.ready = self.sequence.ready
            self.cache.rest(self.ready)
            module = self._hf.model
            self._hooks = [
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]
            self._prefill()
        except BaseException:
            self._end(well=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end(well=kind is None)

    def _end(self, well: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            self._abandon()
        finally:
            if well:
                self.sequence.close()
            else:
                self.sequence.abort()

    def _prefill(self) -> None:
        """Up to where ``generate`` shall go on: states are only had where a pass ends, so some end on boundaries."""
        last = len(self._ids) - 1
        stops = set(range(self.ready + self._chunk, last, self._chunk)) if self._chunk else set()
        if self._stated:
            stops |= {self.sequence.branch or 0, last // self._page * self._page}
        with torch.no_grad():
            for stop in sorted(stop for stop in stops if self.ready < stop <= last):
                start = self.sequence.committed
                ids = torch.tensor([self._ids[start:stop]], device=self._hf.model.device)
                self._runner.call(ids, torch.arange(start, stop, device=ids.device)[None], None, 1)

    # ------------------------------------------------------------ one pass of the model
    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model's forward is about to run."""
        if kwargs.get(self._runner.cache_name) is not self.cache:
            return
        self._check()
        given = dict(kwargs)
        if args:
            given["input_ids"] = args[0]
        start, count = self._named(given)
        sequence = self.sequence
        sequence.grow(start + count - sequence.reserved)
        self._pool.poll()
        step = self._pool.step([sequence])
        step.__enter__()
        self._step = step
        step.run_ops()
        tables = {part.name: step.table(part.name) for part in self._pool.composition.parts}
        self._rows = self.cache.begin(Batch(given["input_ids"], [Span(start, start + count)], tables))

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It has run: what it computed is committed, and published where a state is had. Or it raised: then not."""
        if kwargs.get(self._runner.cache_name) is not self.cache or self._step is None:
            return
        if output is None:
            self._abandon()
            return
        try:
            assert self._rows is not None
            self.cache.check(self._rows)
        except BaseException:
            self._abandon()
            raise
        step, self._step = self._step, None
        self.cache.end()
        step.__exit__(None, None, None)
        self._pool.poll()
        self._check()  # no further pass may come that would be told so
        at = self.sequence.committed
        if self._stated and at % self._page == 0 and (self._every_boundary or at <= self._prompt):
            self.sequence.publish()

    def _check(self) -> None:
        if self.sequence.failed is not None:
            raise ProtocolError(
                "a copy or a step failed that this session had read from, so what it computed is void. Open the "
                "session again: it goes on from what is there"
            ) from self.sequence.failed

    def _abandon(self) -> None:
        """A pass that raised, or was interrupted, did not reach its end: nothing of it counts.

        Where nothing recurs it may be repeated. A state may be half written, and the sequence says so when asked again.
        """
        if self._step is None:
            return
        step, self._step = self._step, None
        self.cache.end()
        step.__exit__(ProtocolError, ProtocolError("the model's forward pass did not end"), None)
        self.cache.rest(self.sequence.committed)
        if not self._stated:
            self.sequence.rewind(self.sequence.reserved - self.sequence.committed)
            del self._ids[max(self._prompt, self.sequence.committed) :]

    def _named(self, given: Mapping[str, Any]) -> tuple[int, int]:
        """Where this pass starts, and how many tokens it has; what is new among them gets its name here."""
        start = self.sequence.committed
        _refuse_what_no_key_tells(given)
        _refuse_other_places(given, start)
        tokens = given["input_ids"][0].tolist()
        known = self._ids[start : start + len(tokens)]
        if known != tokens[: len(known)]:
            raise InputError(
                f"the model was given other tokens at {start} than the session was opened with. Open a session with "
                f"the ids that are generated from"
            )
        self._ids += tokens[len(known) :]
        unnamed = self._ids[self.sequence.named :]
        if unnamed:
            self.sequence.append(unnamed)
        return start, len(tokens)


def _refuse_what_no_key_tells(given: Mapping[str, Any]) -> None:
    """Refuse a pass whose tokens are not remembered by their ids and those before them alone."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None:
        raise InputError("a session knows tokens by their ids, and this pass has none: inputs_embeds cannot be cached")
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise InputError(
            f"a session is one conversation, so a pass has ids of shape (1, n), got {tuple(ids.shape)}; num_beams and "
            f"num_return_sequences must be 1"
        )
    if torch.is_grad_enabled():
        raise InputError("a session cannot be differentiated through: call the model under torch.no_grad()")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and (ids.shape[1] == 1 or mask.all())):
        raise InputError(
            "a session's attention_mask must be all ones: leave padding out. Where ids have the pad token in them, "
            "generate makes a mask that hides it; pass torch.ones_like(ids) then"
        )
    for name, value in given.items():
        if name not in PLAIN and isinstance(value, Tensor) and bool(value.any()):
            raise InputError(f"what is cached is known by token ids alone, and this pass has {name} as well")


def _refuse_other_places(given: Mapping[str, Any], start: int) -> None:
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.numel():
        first = int(positions.flatten()[0])
        if first != start:
            raise InputError(
                f"this pass begins at position {first}, and {start} tokens are computed. Give generate the whole ids, "
                f"those of this session included"
            )


def _tokens(ids: Any) -> list[int]:
    """The prompt, from a tensor of shape (n,) or (1, n) or from whole numbers."""
    if isinstance(ids, Tensor):
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 1 or ids.is_floating_point():
            raise InputError(
                f"a session is one conversation: its ids are of shape (1, n) or (n,), got {tuple(ids.shape)} in "
                f"{ids.dtype}. Open one for each, or let prefixloom's engine batch them"
            )
        ids = ids.tolist()
    tokens = list(ids)
    if not tokens:
        raise InputError("a session needs at least one token")
    return tokens


def session(
    cache: Cache, model: Any, ids: Any, *, namespace: str = "", label: str = "", chunk: int | None = None
) -> Session:
    """Open ``cache`` for one conversation that begins with ``ids``: a context manager.

    ``model``      a causal language model of transformers, or an ``HFModel``; ``cache`` was composed from its config
    ``ids``        the prompt, shape (1, n) or (n,): what ``generate`` will be called with
    ``namespace``  nothing is shared between two
    ``label``      the session's name in errors
    ``chunk``      compute the prompt in passes of so many tokens; None: in one, but for where a state is to be kept

    At its end it publishes what was computed, answer included; an exception in its block publishes nothing more and
    leaks nothing.
    """
    return Session(cache, model, ids, namespace=namespace, label=label, chunk=chunk)
