"""The connector that vLLM makes, once in the scheduler's process and once in each worker's. It hands calls on."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from prefixloom import CompositionError, Identity

from .books import Books, size
from .events import Form, HostEvents
from .figures import MISSED, MISSED_LABELS, NAMES, Figures
from .groups import groups_of, slot_bytes
from .options import Options
from .region import Region
from .scheduler import Plan, SchedulerSide
from .versions import check_interface
from .worker import WorkerSide

log = logging.getLogger("vllm.prefixloom")


@dataclass
class StepPlan(KVConnectorMetadata):
    """What the scheduler's side sends along with a step."""

    plan: Plan = field(default_factory=Plan)


class PrefixloomConnector(KVConnectorBase_V1, SupportsHMA):
    """A host tier below vLLM's device cache, kept by prefixloom. See docs/vllm.md."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_interface(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        self.debug = os.environ.get("PREFIXLOOM_DEBUG") == "1"
        self.figures = Figures()
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self.region: Region | None = None
        config = vllm_config.kv_transfer_config
        options = Options.of(config.kv_connector_extra_config)
        if config.kv_role != "kv_both":
            raise CompositionError(
                f"this connector loads and stores, and vLLM is told so by kv_role 'kv_both'; got {config.kv_role!r}"
            )
        try:
            check_parallel(vllm_config.parallel_config)
            groups = groups_of(kv_cache_config)
        except CompositionError as error:
            if options.unknown_model == "refuse":
                raise
            log.warning("prefixloom is off for this model: %s", error)
            return
        ranks = vllm_config.parallel_config.tensor_parallel_size
        is_worker = role == KVConnectorRole.WORKER
        rank = vllm_config.parallel_config.rank if is_worker else None
        self.region = Region(options.shm, config.engine_id, groups, size(groups, options, ranks), ranks, rank)
        if is_worker:
            at_once = writes_before_asking(vllm_config, kv_cache_config)
            self.worker_side = WorkerSide(groups, self.region, self.figures, self.debug, at_once)
        else:
            identity = identity_of(vllm_config, kv_cache_config, options, ranks)
            books = Books(groups, options, ranks, self.region, identity, self.debug)
            speculates = vllm_config.speculative_config is not None
            events = None
            if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
                events = HostEvents(groups, books.cache, form_of(vllm_config, kv_cache_config))
            self.scheduler_side = SchedulerSide(groups, books, self.region, self.figures, speculates, events)
            if config.kv_load_failure_policy != "recompute":
                log.info(
                    "a load that fails ends its request with an error: say kv_load_failure_policy 'recompute' in "
                    "kv-transfer-config if it is to be computed again"
                )
            names = ", ".join(f"{group.name} of {group.tokens} tokens" for group in groups)
            log.info("host memory: %d slots of %d bytes, for blocks of %s", books.slots, slot_bytes(groups), names)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what it does not have is computed

    # ------------------------------------------------------------ scheduler
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_side is None:
            return 0, False
        found = self.scheduler_side.hit(request, num_computed_tokens)
        self._check()
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.allocated(request, blocks.blocks, num_external_tokens)
            self._check()

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        if self.scheduler_side is None:
            return StepPlan()
        plan = self.scheduler_side.plan(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.kv_connector_block_state,
            new_blocks_of(scheduler_output),
        )
        self._check()
        return StepPlan(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.settle()
            self._check()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        if self.scheduler_side is not None:
            self.scheduler_side.finished(request)
            self._check()
        return False, None

    def has_pending_push_work(self) -> bool:
        if self.scheduler_side is None:
            return False
        self.scheduler_side.settle()
        if not self.scheduler_side.busy:
            return False
        time.sleep(0.001)  # vLLM asks only when it has nothing else to do, and would ask again at once
        return True

    def take_events(self) -> Iterable[Any]:
        return () if self.scheduler_side is None else self.scheduler_side.take_events()

    def reset_cache(self) -> bool:
        if self.scheduler_side is not None:
            self.scheduler_side.reset()
            self._check()
        return True

    def _check(self) -> None:
        if self.debug and self.scheduler_side is not None:
            self.scheduler_side.check()

    # ------------------------------------------------------------ worker
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self.worker_side is not None:
            try:
                self.worker_side.register(kv_caches, self._kv_cache_config.num_blocks)
            except BaseException:  # vLLM shuts down only what has started
                self.shutdown()
                raise

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self.worker_side is not None:
            self.worker_side.before(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker_side is not None:
            self.worker_side.load(self._connector_metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # a request waits for the whole of its load, before it is scheduled

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # a step is stored when all its layers are enqueued

    def wait_for_save(self) -> None:
        if self.worker_side is not None:
            self.worker_side.store(self._connector_metadata.plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return set(), self.get_transfer_results(finished_req_ids).finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self.worker_side is not None:
            # Whole requests, never single blocks: of windows and states, nothing lies before what was to be loaded.
            results.finished_recving, results.failed_recving = self.worker_side.loaded()
        return results

    # ------------------------------------------------------------ both
    def shutdown(self) -> None:
        if self.worker_side is not None:
            self.worker_side.close()
        if self.scheduler_side is not None:
            self.scheduler_side.settle()
            self.scheduler_side.books.close()
        if self.region is not None:
            self.region.close()
        self.worker_side = self.scheduler_side = self.region = None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self.figures.take()
        return PrefixloomStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return PrefixloomStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return PrefixloomPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class PrefixloomStats(KVConnectorStats):
    """The counts of an interval; those of several workers add up."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counts = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in {**self.data, **other.data}}
        return PrefixloomStats(counts)

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in NAMES if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class PrefixloomPromMetrics(KVConnectorPromMetrics):
    """The counts as counters of Prometheus: ``vllm:prefixloom_loads`` and so on."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.counters = {}
        for name, says in NAMES.items():
            counter = self._counter_cls(name=f"vllm:prefixloom_{name}", documentation=says, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self.counters[name, engine] = counter.labels(*values)
        self.values = per_engine_labelvalues
        self.missed = self._counter_cls(
            name=f"vllm:prefixloom_{MISSED}", documentation="Tokens of prompts that the host did not have",
            labelnames=[*labelnames, *MISSED_LABELS],
        )  # fmt: skip

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if (name, engine_idx) in self.counters:
                self.counters[name, engine_idx].inc(count)
            elif name.startswith(f"{MISSED}|"):
                self.missed.labels(*self.values[engine_idx], *name.split("|")[1:]).inc(count)


def new_blocks_of(scheduler_output: Any) -> Iterable[int]:
    """Yield the blocks that a step was given to write to."""
    for new in scheduler_output.scheduled_new_reqs:
        for blocks in new.block_ids:
            yield from blocks
    for tables in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for blocks in tables or ():
            yield from blocks
    for copied in scheduler_output.kv_cache_block_copies or ():
        yield copied.dst_block_id


def extra_keys_of(request: Any, start: int, end: int, size: int) -> list[Any] | None:
    """Return the extra keys of a request's blocks in [start, end), as vLLM's events give them.

    ``size``: tokens of a block. None: only the tokens name these blocks.
    """
    found, image = [], 0
    for at in range(start, end, size):
        keys, image = generate_block_hash_extra_keys(request, at, at + size, image)
        found.append(keys)
    return to_event_extra_keys(found) if any(found) else None


def form_of(vllm_config: Any, kv_cache_config: Any) -> Form:
    """Return the form of vLLM's events: the classes and functions with which its own cache announces blocks."""
    return Form(
        BlockStored, BlockRemoved, AllBlocksCleared, maybe_convert_block_hash, extra_keys_of,
        {
            index: (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
        },
        resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1],
    )  # fmt: skip


def check_parallel(parallel: Any) -> None:
    """Refuse ways to run in parallel under which a worker has not what this connector expects of it."""
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"):
        if getattr(parallel, name, 1) > 1:
            raise CompositionError(
                f"this connector runs on one machine, with tensor parallelism: {name} is {getattr(parallel, name)}"
            )


def writes_before_asking(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether a worker writes to a step's new blocks before it asks this connector to finish copies of them.

    vLLM's second model runner clears and copies blocks, where there are states or mixed types, before it calls
    ``handle_preemptions``. Then a step must end with its stores.
    """
    return bool(vllm_config.use_v2_model_runner) and bool(kv_cache_config.needs_kv_cache_zeroing)


def weights_of(vllm_config: Any, options: Options) -> str:
    """Return a text for these weights alone: the user's, a hub's commit, or a digest of a folder's files."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if options.weights is not None:
        return options.weights
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return str(commit)
    files = sorted(Path(model.model).glob("*.safetensors")) + sorted(Path(model.model).glob("*.bin"))
    if files and load.load_format != "dummy":
        return digest_of_files(files)
    if options.store is None:
        return "of this process alone"
    raise CompositionError(
        "a store keeps content for other processes, and nothing tells these weights from others (load_format "
        f'{load.load_format!r}, model {model.model!r}): say "weights" in kv_connector_extra_config, a text that '
        "changes whenever they do"
    )


def digest_of_files(files: Sequence[Path]) -> str:
    """Digest weight files: their names and sizes, when they were written, and bytes spread over each."""
    hashed = hashlib.blake2b(digest_size=16)
    for path in files:
        state = path.stat()
        hashed.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            for at in range(0, state.st_size, max(1, state.st_size // 64)):
                file.seek(at)
                hashed.update(file.read(4096))
    return hashed.hexdigest()


def identity_of(vllm_config: Any, kv_cache_config: Any, options: Options, ranks: int) -> Identity:
    """Return all that content depends on beside its tokens."""
    model = vllm_config.model_config
    groups = [
        {"layers": len(group.layer_names), "spec": repr(group.kv_cache_spec)}
        for group in kv_cache_config.kv_cache_groups
    ]
    precision = {
        "dtype": str(model.dtype),
        "cache": vllm_config.cache_config.cache_dtype,
        "layout": kv_cache_config.kv_cache_layout,
        "quantization": model.quantization,
        "vllm": vllm.__version__,
        "groups": groups,
    }
    return Identity(
        model=model.model,
        weights=weights_of(vllm_config, options),
        precision=repr(precision),
        positions=repr(getattr(model.hf_text_config, "rope_parameters", None)),
        salt=f"tensor_parallel_size {ranks}",
    )
