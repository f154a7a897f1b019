"""``session``: one conversation of a transformers model, computed by its own ``generate``, over a composed cache.

    with cache.session(model, ids) as s:  # or session(cache, model, ids)
        out = model.generate(ids, past_key_values=s.cache)

What hits, on the device or in a tier below, is not computed again, and what was computed is published at the end. While
the session is open, two hooks on the model run before and after each of its forward passes over ``s.cache``: the first
reserves slots, the second commits. Sessions in several threads take turns at their cache, pass by pass.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Set
from threading import Condition, Lock, Thread, current_thread
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, Identity, InputError, ProtocolError, Sequence

from ..contract.model import Batch, Span
from ..contract.requests import shown
from .cache import PooledCache
from .images import MARKS, marks_nothing, positions_of
from .model import HFModel
from .refusals import refuse_autocast, refuse_generation, refuse_pass_without_cache
from .rows import Rows

CHECKED_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position"})
"""What a forward pass may be given that its content depends on: each is checked against the session's tokens."""
OTHER_INPUTS = frozenset({
    "past_key_values", "cache_params", "use_cache", "labels", "logits_to_keep", "num_logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits",
})  # fmt: skip
"""What it may be given that changes nothing of what is cached. Anything else is refused, whatever its type."""
STORE_POLL_SECONDS = 0.001
"""How long a session that waits for a store waits before it asks again."""
DEAD_POLL_SECONDS = 1.0
"""How often a thread that waits for its turn looks whether the one before it is still alive."""


class CacheTurn:
    """One thread at a time drives a cache: its sessions take this for a whole pass, or to open and to end."""

    def __init__(self, cache: Cache) -> None:
        self._cache = ref(cache)
        self._changed = Condition()
        self._thread: Thread | None = None

    def take(self) -> None:
        with self._changed:
            while self._thread not in (None, current_thread()) and self._thread.is_alive():
                self._changed.wait(DEAD_POLL_SECONDS)
            self._thread = current_thread()
        cache = self._cache()
        assert cache is not None
        cache.take_over()

    def give(self) -> None:
        with self._changed:
            if self._thread is current_thread():
                self._thread = None
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.give()


_making = Lock()
_turns: WeakKeyDictionary[Cache, CacheTurn] = WeakKeyDictionary()


def _hook(method: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Make a hook of a session's method, which takes ``count`` arguments.

    It does not keep the session, and a copy of the model gets no copy of the session with it. If another thread has
    removed the hook while torch was about to call it, torch leaves out the keyword arguments. A model that compiles
    itself compiles its hooks too, but not this one.
    """
    held = WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = held()
        return alive(*args) if alive is not None and len(args) == count else None

    uncompiled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return uncompiled


class Session:
    """One conversation: a context manager that ``session`` makes, to be entered once.

    ``cache``     the ``past_key_values`` for ``generate`` or for a call of the model
    ``ready``     how many tokens of the prompt hit; set when the session is entered
    ``sequence``  the running sequence in the cache; set when the session is entered
    """

    cache: PooledCache
    sequence: Sequence
    ready: int

    def __init__(self, cache: Cache, model: Any, ids: Any, *, namespace: str, label: str, chunk: int | None) -> None:
        self._hf = copy.copy(model) if isinstance(model, HFModel) else HFModel(model)  # it remembers what it was asked
        refuse_generation(self._hf.model)
        self._runner = self._hf.bind(cache)
        self._pool = cache
        inputs = ids if isinstance(ids, Mapping) else {"input_ids": ids}
        self._ids = _token_list(inputs.get("input_ids"), self._hf.vocabulary)
        self._images = self._hf.media(self._ids, inputs)
        if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
            raise InputError(f"chunk takes a number of tokens from 1 up, got {chunk!r}")
        self._prompt = len(self._ids)
        self._chunk = chunk
        self._namespace, self._label = namespace, label
        self._regime = self._runner.rope.regime(self._prompt) if self._runner.rope is not None else ""
        self._page = cache.composition.page
        states = [part.manifest for part in cache.composition.parts if not part.page_tokens]
        self._stateful = bool(states)
        self._every_boundary = any(not manifest.checkpoint_every for manifest in states)
        self._hooks: list[Any] = []
        self._step: Any = None
        self._rows: Rows | None = None
        self._used = self._passed = False
        with _making:
            self._turn = _turns.setdefault(cache, CacheTurn(cache))
        self._identity: Identity | None = None
        self.cache = self._runner.pooled
        self.cache.outgrown = self._runner.rope is not None and not self._regime

    # ------------------------------------------------------------ with
    def __enter__(self) -> Session:
        if self._used:
            raise ProtocolError("a session is used once: open another one")
        self._used = True
        with self._turn:
            identity = self._identity = self._pool.identity = self._hf.identity
            namespace = attrs.evolve(identity, positions=self._regime).namespace(self._namespace)
            self.sequence = self._pool.open(
                self._ids, leave=1, namespace=namespace, label=self._label, extra=self._images.extra
            )
        try:
            self._open()
        except BaseException:
            self._end(well=False)
            raise
        self._passed = False
        return self

    def _open(self) -> None:
        with self._turn:
            restored = self.sequence.restore()
        while not restored.over:
            time.sleep(STORE_POLL_SECONDS)
            with self._turn:
                self._pool.poll()
        self.ready = self.sequence.ready
        self.cache.continue_from(self.ready)
        module = self._hf.model
        self._hooks = [
            module.register_forward_pre_hook(_hook(self._before, 3), prepend=True, with_kwargs=True),
            module.register_forward_hook(_hook(self._after, 4), with_kwargs=True, always_call=True),
        ]
        self._prefill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end(well=kind is None)
        if kind is None and not self._passed:
            warnings.warn(
                f"a session ended without any pass over its cache, so nothing was reused and no answer is kept: give "
                f"generate {self._runner.cache_name}=s.cache",
                stacklevel=2,
            )

    def _end(self, well: bool) -> None:
        with self._turn:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            try:
                self._abandon()
                self._check_model(well and self._hf.written())
            except BaseException:
                self.sequence.abort()
                raise
            if well:
                self.sequence.close()
            else:
                self.sequence.abort()

    def _prefill(self) -> None:
        """Compute the prompt except its last token, with which ``generate`` begins.

        A state can be kept only where a pass ends, so passes end at the boundaries at which states are useful.
        """
        last = len(self._ids) - 1
        rope, one_by_one = self._runner.rope, self._runner.scans_from_zero
        shortest = rope.limit + 1 if rope is not None and self._regime else 0  # where the first pass ends at the least
        with torch.no_grad():
            while (start := self.sequence.committed) < last:
                budget = 1 if one_by_one and start else self._chunk or len(self._ids)
                if start < shortest:
                    budget = max(budget, shortest + self._page - start)
                stop = self._images.pass_end(start, max(self.sequence.next_stop(budget), shortest))
                if one_by_one:
                    stop = min(stop, last)
                if stop > last:
                    return
                ids = torch.tensor([self._ids[start:stop]], device=self._hf.model.device)
                self._runner.call(ids, torch.arange(start, stop, device=ids.device)[None], None, 1)

    # ------------------------------------------------------------ one pass of the model
    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reserve slots, run the ops of the step, and begin the pass. The hook before the model's forward."""
        if kwargs.get(self._runner.cache_name) is not self.cache:
            if any(each is self.cache for each in (*args, *kwargs.values())):
                raise InputError(f"a model of {type(module).__name__} takes its cache as {self._runner.cache_name}=")
            return None
        self._turn.take()
        try:
            return self._begin(module, args, kwargs)
        finally:
            if self._step is None:
                self._turn.give()

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._hooks or module is not self._hf.model:
            return None  # it has just ended, or this is a copy of its model: the layers refuse the pass
        first, self._passed = not self._passed, True
        self._check_model(self._hf.recoded() or (first and self._hf.written()))
        self._check_copies()
        given = self._without_computed({**dict(zip(self._runner.input_names, args, strict=False)), **kwargs})
        given = self._without_images(given)
        start, count = self._name_tokens(given)
        span = Span(start, start + count, self._images)
        given |= self._runner.media_inputs([span])
        sequence = self.sequence
        sequence.grow(start + count - sequence.reserved)
        self._pool.poll()
        step = self._pool.step([sequence])
        step.__enter__()
        self._step = step
        step.run_ops()
        tables = {part.name: step.table(part.name) for part in self._pool.composition.parts}
        self._rows = self.cache.begin(Batch(given["input_ids"], [span], tables))
        if self._runner.places_images:
            given["position_ids"] = positions_of(self._rows)
        return (), given

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Commit the pass and publish a state; abandon it if the model raised. The hook after the model's forward."""
        if kwargs.get(self._runner.cache_name) is not self.cache or self._step is None:
            return
        try:
            self._commit(output)
        finally:
            self._turn.give()

    def _commit(self, output: Any) -> None:
        if output is None:
            self._abandon()
            return
        try:
            assert self._rows is not None
            self.cache.check(self._rows)
            self._check_model(self._hf.changed())
        except BaseException:
            self._abandon()
            raise
        step, self._step = self._step, None
        self.cache.end()
        step.__exit__(None, None, None)
        self._pool.poll()
        self._check_copies()  # there may be no further pass that would raise this error
        at = self.sequence.committed
        if self._stateful and at % self._page == 0 and (self._every_boundary or at <= self._prompt):
            self.sequence.publish()

    def _check_model(self, changed: bool) -> None:
        """Raise if the model may have changed, and is not the one with which the session was opened."""
        if changed and (self._hf.model.training or self._hf.identity != self._identity):
            raise ProtocolError(
                "the model's weights, adapters, hooks or mode have changed since this session was opened, so what it "
                "would compute does not continue what it has. Open another session. An adapter for one call "
                "(adapter_names=) is a hook: activate it with set_adapter before the session is opened"
            )

    def _check_copies(self) -> None:
        if self.sequence.failed is not None:
            raise ProtocolError(
                "a copy or a step failed that this session had read from, so what it computed is void. Open the "
                "session again: it goes on from what is there"
            ) from self.sequence.failed

    def _abandon(self) -> None:
        """Undo a pass that raised or was interrupted.

        Without recurrent layers the pass may be repeated. With them a state may be half written, and then the sequence
        refuses every further step.
        """
        if self._step is None:
            return
        step, self._step = self._step, None
        self.cache.end()
        step.__exit__(ProtocolError, ProtocolError("the model's forward pass did not end"), None)
        self.cache.continue_from(self.sequence.committed)
        if not self._stateful:
            self.sequence.rewind(self.sequence.reserved - self.sequence.committed)
            del self._ids[max(self._prompt, self.sequence.committed) :]

    def _without_computed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is computed of a prompt that ``generate`` gives whole.

        It does so itself for ``past_key_values``. Models that are all states take their cache under another name.
        """
        ids, start = kwargs.get("input_ids"), self.sequence.committed
        if self._runner.cache_name == "past_key_values" or not isinstance(ids, Tensor):
            return kwargs
        if not 0 < start < self._prompt or ids.shape != (1, self._prompt) or ids[0].tolist() != self._ids:
            return kwargs
        cut = {"input_ids": ids[:, start:]}
        if isinstance(kwargs.get("attention_mask"), Tensor):
            cut["attention_mask"] = kwargs["attention_mask"][:, start:]
        return {**kwargs, **cut}

    def _without_images(self, given: dict[str, Any]) -> dict[str, Any]:
        """Leave out the images that ``generate`` gives, since the session has them, and positions made of them.

        Those are of the images that the model was last called with, whatever the session has.
        """
        ids, start = given.get("input_ids"), self.sequence.committed
        if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
            return given
        end = start + ids.shape[1]
        of_prompt = min(end, self._prompt)
        if self._images.pass_end(start, of_prompt) != of_prompt:
            raise InputError(f"a pass ends at {end}, inside an image whose tokens see each other")
        given = self._images.without_own(self._hf.model, given, start, end)
        if self._runner.places_images:
            given.pop("position_ids", None)
        return given

    def _name_tokens(self, given: Mapping[str, Any]) -> tuple[int, int]:
        """Return where this pass starts and how many tokens it has; append its new tokens to the sequence's key."""
        start = self.sequence.committed
        _refuse_inputs_outside_the_key(self._hf.model, given, start, self._runner.cache_name)
        if self._runner.rope is not None:
            self._runner.rope.check(self._regime, start + given["input_ids"].shape[1])
        tokens = given["input_ids"][0].tolist()
        known = self._ids[start : start + len(tokens)]
        if known != tokens[: len(known)]:
            raise InputError(
                f"the model was given other tokens at {start} than the session was opened with. Open a session with "
                f"the ids that are generated from"
            )
        self._ids += tokens[len(known) :]
        if self._runner.scans_from_zero and start and len(tokens) > 1:
            raise InputError(
                f"this model's code goes on from a state with single tokens only, and this pass has {len(tokens)}. "
                f"Open a session with all ids, which computes them so"
            )
        unnamed = self._ids[self.sequence.named :]
        if unnamed:
            self.sequence.append(unnamed)
        return start, len(tokens)


def _refuse_inputs_outside_the_key(model: Any, given: Mapping[str, Any], start: int, cache_name: str) -> None:
    """Refuse a pass in which the entry of a token depends on more than the token's id and those before it."""
    ids = given.get("input_ids")
    if ids is None:
        raise InputError("a session knows tokens by their ids, and this pass has none: inputs_embeds cannot be cached")
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise InputError(
            f"a session is one conversation, so a pass has ids of shape (1, n), got {tuple(ids.shape)}; num_beams and "
            f"num_return_sequences must be 1"
        )
    if torch.is_grad_enabled():
        raise InputError("a session cannot be differentiated through: call the model under torch.no_grad()")
    refuse_autocast(ids.device.type)
    refuse_pass_without_cache(given)
    _refuse_other_mask(given.get("attention_mask"), start, ids.shape[1], cache_name)
    for name, value in given.items():
        if name in CHECKED_INPUTS or name in OTHER_INPUTS or value is None:
            continue
        if isinstance(value, Mapping) and not value:  # what a generate of text alone makes of no images
            continue
        if name not in MARKS or not isinstance(value, Tensor) or not marks_nothing(model, name, value):
            raise InputError(
                f"what is cached is known by token ids alone, and this pass has {name} as well. A session takes "
                f"{', '.join(sorted(CHECKED_INPUTS))}"
            )
    end = start + ids.shape[1]
    for name in ("position_ids", "cache_position"):
        _refuse_other_positions(name, given.get(name), start, end)


def _refuse_other_mask(mask: Any, start: int, count: int, cache_name: str) -> None:
    """Refuse a mask that hides a token or weighs it: some models multiply by it, so only ones say nothing.

    It is as long as all tokens, or as a pass in models that are all states.
    """
    if mask is None:
        return
    end = start + count
    lengths = (end,) if cache_name == "past_key_values" else (end, count)
    ones = isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == 1 and bool((mask == 1).all())
    if ones and mask.shape[1] in lengths:
        return
    if ones:
        raise InputError(
            f"this pass ends at {end} tokens, and its attention_mask is of shape {tuple(mask.shape)}. Give generate "
            f"the whole ids, those of this session included"
        )
    raise InputError(
        f"a session's attention_mask must be all ones, and this one {_described(mask)}. Where ids have the pad token "
        f"in them, generate makes a mask that hides it; pass torch.ones_like(ids) then"
    )


def _described(mask: Any) -> str:
    """Say what is wrong with a mask, and what to do."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != 1 or not bool(((mask == 0) | (mask == 1)).all()):
        return f"is not one of ones and zeros of shape (1, n): {shown(mask)}"
    hidden = (mask[0] == 0).nonzero()[:, 0].tolist()
    count, total = len(hidden), mask.shape[1]
    if hidden == list(range(count)):
        return f"has left padding, its first {count} places: leave it out, with ids[:, {count}:] as the session's ids"
    if hidden == list(range(total - count, total)):
        return f"has right padding, its last {count} places: leave it out, with ids[:, :-{count}] as the session's ids"
    return f"has holes, {count} places from {hidden[0]} to {hidden[-1]}: open the session with the ids that it leaves"


def _refuse_other_positions(name: str, positions: Any, start: int, end: int) -> None:
    """Refuse positions other than those of the tokens [start, end)."""
    if positions is None:
        return
    right = torch.arange(start, end, device=getattr(positions, "device", None))
    if not isinstance(positions, Tensor) or positions.shape[-1:] != right.shape:
        raise InputError(f"this pass has tokens at {start} to {end - 1}, and {name} of another form")
    if not bool((positions == right).all()):
        raise InputError(
            f"this pass has {name} from {int(positions.flatten()[0])} to {int(positions.flatten()[-1])}, and its "
            f"tokens are at {start} to {end - 1}. Give generate the whole ids, those of this session included"
        )


def _token_list(ids: Any, vocabulary: int) -> list[int]:
    """Convert a prompt: a tensor of shape (n,) or (1, n), or an iterable of whole numbers below ``vocabulary``."""
    if isinstance(ids, Tensor):
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 1 or ids.is_floating_point():
            raise InputError(
                f"a session is one conversation: its ids are of shape (1, n) or (n,), got {tuple(ids.shape)} in "
                f"{ids.dtype}. Open one for each, or let prefixloom's engine batch them"
            )
    if ids is None:
        raise InputError("a session's inputs have no input_ids")
    try:
        if isinstance(ids, (str, bytes, Mapping, Set)):
            raise TypeError("it has no tokens in an order")
        tokens = list(ids.tolist() if hasattr(ids, "tolist") else ids)
    except TypeError as error:
        raise InputError(f"a session's ids are a tensor or a list of tokens, got {shown(ids)}") from error
    if not tokens:
        raise InputError("a session needs at least one token")
    wrong = next((token for token in tokens if token.__class__ is not int or not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InputError(
            f"a session's ids have the token {shown(wrong)}: the model's are whole numbers from 0 to {vocabulary - 1}"
        )
    return tokens


def session(
    cache: Cache, model: Any, ids: Any, *, namespace: str = "", label: str = "", chunk: int | None = None
) -> Session:
    """Open ``cache`` for one conversation that begins with ``ids``; returns a context manager.

    ``model``      a causal language model of transformers, or an ``HFModel``; ``cache`` was composed from its config
    ``ids``        the prompt, of shape (1, n) or (n,), with which ``generate`` will be called; or what a processor made
                   of text and images: a mapping with ``input_ids``, ``pixel_values`` and so on
    ``namespace``  sessions of different namespaces share nothing in the cache
    ``label``      the name of the session in errors
    ``chunk``      how many tokens one pass of the prompt computes; None: all. A pass also ends where a state is kept

    The end of the block publishes what was computed, the answer included. If the block raises, nothing more is
    published, and all pages are given back.
    """
    return Session(cache, model, ids, namespace=namespace, label=label, chunk=chunk)
