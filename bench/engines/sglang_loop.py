"""SGLang's scheduling loop over its real pools, with SGLang's own prefix cache or with ours, and without a model.

Requests wait in a queue, are admitted by SGLang's ``PrefillAdder``, run in its batches and are released by its own
calls, as in ``Scheduler.event_loop_normal`` and ``event_loop_overlap``. Only the forward pass is left out: what a
request is going to sample is given with it. Whoever wants to see what a pass reads and writes overrides ``forward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from bench.engines.sglang import FINISH_ABORT, FINISH_LENGTH, PrefillAdder, SGLangCache
from bench.engines.stand_ins import imported

with imported("sglang", "0.5.23"):
    from sglang.srt.managers.schedule_policy import AddReqResult
    from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_swa_tokens, kv_private_tokens


class Device:
    """A device that has always done its work."""

    def run(self, work: Any) -> None:
        work()


class Scheduling(SGLangCache):
    """The loop. A class of it names the cache: SGLang's own, or ours."""

    chunk: ClassVar[int] = 1 << 20
    """Tokens of a prefill pass."""
    ratio: ClassVar[float] = 0.5
    """The part of the answers' tokens for which the admission of a request keeps room."""

    def __init__(self, letters: str, page: int, tokens: int, states: int, window: int) -> None:
        self.waiting: list[Any] = []
        self.answers: dict[Any, Sequence[int]] = {}
        self.hits: dict[Any, int] = {}
        """The tokens that hit when a request was admitted first."""
        self.retractions = 0
        self._aborted: Any = None
        super().__init__(Device(), letters, page, tokens, states, window)

    def submit(
        self, tokens: Sequence[int], answer: Sequence[int], *, extra_key: str | None = None,
        cache_salt: str | None = None, priority: int | None = None,
    ) -> Any:  # fmt: skip
        """Put a request into the queue. ``answer`` is what it is going to sample."""
        request = self.request(tokens, len(answer), extra_key=extra_key, cache_salt=cache_salt, priority=priority)
        self.answers[request] = answer
        self.waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or a result is still to be processed."""
        return bool(self.waiting or self.chunked or self._launched or not self.running.is_empty() or self.last)

    def abort_request(self, request: Any) -> None:
        """Drop a waiting request, or let a running one end with its next token, as ``Scheduler`` does."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request is self.chunked:
            self._aborted = request
        elif not request.finished():
            request.to_finish = FINISH_ABORT("Aborted")

    # ------------------------------------------------------------ the loop
    def iterate(self) -> bool:
        """Do one round of the event loop. Return False if there was no batch to launch and no result to process."""
        batch = self._next_batch()
        if batch is not None:
            self.forward(batch)
            self._launched.append(batch.copy())
        self.last = batch
        late = 1 if self.overlap and batch is not None else 0
        processed = 0
        while len(self._launched) > late:
            self.processed(self._launched.pop(0), self._sample)
            processed += 1
        return batch is not None or processed > 0

    def forward(self, batch: Any) -> None:
        """Compute the forward pass: here nothing."""

    def _next_batch(self) -> Any:
        """Do what get_next_batch_to_run does."""
        self._abort_chunked()
        self.take_over()
        batch = self._prefill()
        if batch is not None:
            return batch
        return None if self.running.is_empty() else self._decode()

    def _abort_chunked(self) -> None:
        """Do what process_pending_chunked_abort does."""
        request, self._aborted = self._aborted, None
        if request is None or request is not self.chunked:
            if request is not None and not request.finished():
                request.to_finish = FINISH_ABORT("Aborted")
            return
        self.abort(request)

    def _prefill(self) -> Any:
        """Do what _get_new_batch_prefill_raw does, first come, first served."""
        if self.chunked is None and (not self.waiting or self.rows.available_size() <= 0):
            return None
        adder = PrefillAdder(
            self.page, self.cache, self.allocator, self.running, self.ratio, 1 << 20, self.chunk,
            max_running_requests=64,
        )  # fmt: skip
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        states = getattr(self.rows, "mamba_allocator", None)
        if states is not None:
            states.alloc_group_begin(len(self.waiting))
        for request in self.waiting:
            admitted = adder.can_run_list
            if adder.budget_state() == AddReqResult.OTHER or not self.has_row(admitted):
                break
            request.init_next_round_input(self.cache)
            answer = adder.add_one_req(request, has_chunked_req=self.chunked is not None, truncation_align_size=None)
            if answer != AddReqResult.CONTINUE:
                if not (admitted and admitted[-1] is request):
                    self.take_states_back(request)
                break
        if states is not None:
            states.alloc_group_end()
        admitted = adder.can_run_list
        if not admitted:
            return None
        for request in admitted:
            self.hits.setdefault(request, request.prefix_len)
            if request not in self._live:
                self._live.append(request)
        ready = {id(each) for each in admitted}
        self.waiting = [each for each in self.waiting if id(each) not in ready]
        if adder.new_chunked_req is not None:
            assert self.chunked is None
            self.chunked = adder.new_chunked_req
        return self.prefill_batch(admitted)

    def _decode(self) -> Any:
        """Do what update_running_batch does."""
        if not self.running.check_decode_mem():
            retracted, _, aborted = self.running.retract_decode()
            self.retractions += len(retracted)
            self.waiting[:0] = retracted
            for request in (*retracted, *aborted):
                self._live.remove(request)
            if self.running.is_empty():
                return None
        self.running.prepare_for_decode()
        return self.running

    def _sample(self, request: Any) -> bool:
        answer = self.answers[request]
        request.output_ids.append(answer[len(request.output_ids)])
        if request.to_finish is None and len(request.output_ids) == len(answer):
            request.to_finish = FINISH_LENGTH(len(answer))
            request.finished_len = self.kept(request)
        return True

    def kept(self, request: Any) -> int | None:
        """Return how many tokens of a whole answer are kept. With a draft model a stop may lie before the last ones."""
        return None

    # ------------------------------------------------------------ checks
    def sums(self) -> dict[str, tuple[int, int]]:
        """Return by pool the sum that SGLang's invariant checker makes, and the sum that it must be."""
        cache, allocator = self.cache, self.allocator
        private = [each.kv for each in self._live if each.kv.holds_kv]
        tokens = sum(kv_private_tokens(each, self.page) for each in private)
        if "S" in self.letters:
            windows = sum(kv_private_swa_tokens(each, self.page) for each in private)
            full = allocator.full_available_size() + cache.full_evictable_size() + cache.full_protected_size()
            swa = allocator.swa_available_size() + cache.swa_evictable_size() + cache.swa_protected_size()
            return {"full": (full + tokens, allocator.size_full), "windows": (swa + windows, allocator.size_swa)}
        free = allocator.available_size() + cache.evictable_size() + cache.protected_size()
        return {"full": (free + tokens, allocator.size)}
