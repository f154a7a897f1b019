"""A shared trace through vLLM's real scheduler, without a connector, with vLLM's own offloading, and with ours.

The forward passes are faked: a step answers with a token for each request that has reached the end of what is known,
and copies between the device and the host are over when the step is. All else is vLLM's: its scheduler, block pool,
caches of each kind, admission and preemption, and its own connector with its host tier's books. Each side gets the same
blocks on the device and the same bytes on the host. ``model`` is a folder with a config.json, whose sizes are not used.

Counted are the tokens that each side found, and the processor time of the thread that schedules: in ``add_request``,
``schedule`` and ``update_from_output``, where connectors do all their work. Run in vLLM's environment (docs/vllm.md).
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from bench.engines.stand_ins import imported
from bench.engines.vllm import (
    KVCacheConfig,
    KVCacheGroupSpec,
    Request,
    SamplingParams,
    Scheduler,
    get_request_block_hasher,
    sha256,
    spec_of,
)
from bench.runner.figures import Rows
from prefixloom.lab import BlockPrompt, read_trace

with imported("vllm", "0.33.0"):
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheTensor
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.structured_output import StructuredOutputManager

KINDS = {"full": "path", "window": "window", "state": "state"}
LONGEST = 200_000


@attrs.frozen
class Scene:
    """What all sides share."""

    model: str
    groups: tuple[str, ...]
    page: int
    window: int
    device: int
    """Blocks on the device."""
    host: int
    """Bytes on the host."""
    running: int
    budget: int
    """Tokens of a step."""
    shm: str


Asked = tuple[list[int], int]
"""The tokens of a prompt, and how many its answer has."""


def entries(trace: Path, count: int, block: int, scale: int, answer: int) -> Iterator[Asked]:
    """Yield the first requests of a trace, with ``scale`` times fewer tokens. An id names a block's tokens."""
    for each in read_trace(trace, block=block, limit=count):
        assert isinstance(each.prompt, BlockPrompt), f"{trace} is no trace of blocks"
        size, length = block // scale, min(each.prompt.count // scale, LONGEST - answer - 1)
        ids = each.prompt.ids[: -(-max(1, length) // size)]
        prompt = BlockPrompt(ids, size, max(1, min(length, len(ids) * size)))
        yield prompt.tokens().tolist(), max(1, min(answer, each.output // scale))


BLOCK_BYTES = 4096
"""Of a block on the host. vLLM's own tier rounds up to this."""


def groups_of(scene: Scene) -> KVCacheConfig:
    """Return groups of one layer whose blocks have the same bytes, as vLLM makes them."""
    groups = [
        KVCacheGroupSpec(
            [f"{at}.{each}"],
            spec_of(KINDS[each], scene.page, BLOCK_BYTES // (1 if each == "state" else scene.page), scene.window),
        )
        for at, each in enumerate(scene.groups)
    ]
    sizes = {group.kv_cache_spec.page_size_bytes for group in groups}
    assert sizes == {BLOCK_BYTES}, sizes
    names = [group.layer_names[0] for group in groups]
    memory = KVCacheTensor(scene.device * BLOCK_BYTES, names, 0, BLOCK_BYTES)
    return KVCacheConfig(num_blocks=scene.device, kv_cache_tensors=[memory], kv_cache_groups=groups)


def connector_of(side: str, scene: Scene) -> KVTransferConfig | None:
    if side == "none":
        return None
    if side == "prefixloom":
        return KVTransferConfig(
            kv_connector="PrefixloomConnector", kv_connector_module_path="prefixloom_vllm.connector",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={"memory": scene.host, "shm": scene.shm},
        )  # fmt: skip
    more: dict[str, Any] = {"cpu_bytes_to_use": scene.host, "eviction_policy": "lru"}
    if side == "reach":
        chunks = {"window": -(-(scene.window - 1) // scene.page), "state": 1}
        windows = ",".join(f"{at}={chunks[each]}" for at, each in enumerate(scene.groups) if each in chunks)
        more |= {"eviction_policy": f"ReachPolicy({windows})"}
        more["cache_policy_module_path"] = "prefixloom_vllm.reach_policy"
    elif side == "arc":
        more["eviction_policy"] = "arc"
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=more)


def scheduler_of(side: str, scene: Scene) -> tuple[Scheduler, VllmConfig, KVCacheConfig]:
    model = ModelConfig(model=scene.model, dtype="bfloat16", seed=1, skip_tokenizer_init=True)
    model.max_model_len = LONGEST
    cache = CacheConfig(block_size=scene.page, enable_prefix_caching=True)
    if "state" in scene.groups:
        cache.mamba_cache_mode = "align"
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=scene.running, max_num_batched_tokens=scene.budget, max_model_len=LONGEST,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
        ),
        model_config=model, cache_config=cache, parallel_config=ParallelConfig(),
        kv_transfer_config=connector_of(side, scene),
    )  # fmt: skip
    kv_cache_config = groups_of(scene)
    config.cache_config.num_gpu_blocks = scene.device
    register_all_kvcache_specs(config)
    scheduler = Scheduler(
        vllm_config=config, kv_cache_config=kv_cache_config, block_size=scene.page, log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip
    return scheduler, config, kv_cache_config


class CopiesThatEnd:
    """Says that copies are over: loads and stores of ours when the step is, stores of vLLM's a step later, as there."""

    def __init__(self, side: str, scheduler: Scheduler, config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self.region: Any = None
        self.waiting: list[int] = []
        if side == "prefixloom":
            from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

            from prefixloom_vllm.connector import PrefixloomConnector

            self.connector = PrefixloomConnector(config, KVConnectorRole.WORKER, kv_cache_config)
            self.region = self.connector.region

    def output(self, told: Any) -> KVConnectorOutput | None:
        meta = told.kv_connector_metadata
        if meta is None:
            return None
        if self.region is not None:
            for copy in (*meta.plan.loads, *meta.plan.stores):
                self.region.finish(copy.number, True)
            return KVConnectorOutput(finished_recving={copy.request for copy in meta.plan.loads})
        answer = OffloadingWorkerMetadata()
        flushed = [job for job in meta.jobs_to_flush or () if job in meta.store_jobs]
        for job in (*self.waiting, *meta.load_jobs, *flushed):
            answer.mark_completed(job)
        self.waiting = [job for job in meta.store_jobs if job not in flushed]
        return KVConnectorOutput(
            finished_recving={job.req_id for job in meta.load_jobs.values()}, kv_connector_worker_meta=answer
        )


def run(side: str, scene: Scene, asked: list[Asked]) -> dict[str, Any]:
    """Serve all requests, ``scene.running`` at a time, and count."""
    scheduler, config, kv_cache_config = scheduler_of(side, scene)
    worker = CopiesThatEnd(side, scheduler, config, kv_cache_config)
    hasher = get_request_block_hasher(scheduler.hash_block_size, sha256)
    requests = deque(enumerate(asked))
    gc.collect()
    gc.freeze()  # what is there is not looked at again, as in vLLM's engine
    found = {"side": side, "requests": len(requests), "prompt": sum(len(tokens) for tokens, _ in asked)}
    local = external = steps = open_requests = 0
    times: list[float] = []
    spent = 0.0
    clock = time.thread_time
    while requests or scheduler.has_unfinished_requests():
        while requests and open_requests < scene.running:
            number, (prompt, count) = requests.popleft()
            begun = clock()
            request = Request(  # it hashes its blocks at once
                request_id=str(number), prompt_token_ids=prompt, pooling_params=None, block_hasher=hasher,
                sampling_params=SamplingParams(max_tokens=count, ignore_eos=True),
            )  # fmt: skip
            scheduler.add_request(request)
            spent += clock() - begun
            open_requests += 1
        begun = clock()
        told = scheduler.schedule()
        spent += clock() - begun
        steps += 1
        ready = worker.output(told)
        names = [*told.num_scheduled_tokens]
        tokens = []
        for name in names:
            request = scheduler.requests[name]
            tokens.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=tokens,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[], kv_connector_output=ready,
        )  # fmt: skip
        begun = clock()
        outputs = scheduler.update_from_output(told, output)
        spent += clock() - begun
        for each in outputs.values():
            for one in each.outputs:
                if one.prefill_stats is not None:
                    local += one.prefill_stats.num_local_cached_tokens
                    external += one.prefill_stats.num_external_cached_tokens
                if one.finish_reason is not None:
                    open_requests -= 1
                    times.append(spent)
        assert steps < 100 * len(asked) + 10_000, "the traffic does not end"
    each_time = [after - before for before, after in itertools.pairwise(times)]
    found |= {"local": local, "external": external, "steps": steps, "seconds": spent}
    found |= {"ms": spent / len(asked) * 1e3, "median": statistics.median(each_time) * 1e3}
    if scheduler.connector is not None:
        scheduler.connector.shutdown()
    if worker.region is not None:
        worker.connector.shutdown()
    return found


def vllm_trace(
    trace: str, model: str, block: int = 512, scale: int = 8, requests: int = 500, answer: int = 32,
    groups: str = "full", page: int = 16, window: int = 128, device: int = 2000, host: int = 4000, running: int = 8,
    budget: int = 2048, sides: str = "none,offloading,prefixloom", shm: str = "/dev/shm",
) -> Rows:  # fmt: skip
    """Return what each side found and its time. ``block``: tokens of a block of the trace; ``scale``: how many fewer.

    ``device`` and ``host`` are blocks. Sides may also be "arc" and "reach": other policies of vLLM's host tier.
    """
    asked = [*entries(Path(trace), requests, block, scale, answer)]
    scene = Scene(
        model, tuple(groups.split(",")), page, window, device, host * BLOCK_BYTES, running, budget, shm
    )  # fmt: skip
    found: Rows = {}
    by_side = {side: run(side, scene, asked) for side in sides.split(",")}
    for side, got in by_side.items():
        share = (got["local"] + got["external"]) / got["prompt"]
        rows = {
            "found on the device": got["local"], "found on the host": got["external"],
            "of the prompts, %": 100 * share, "ms of the scheduler a request": got["ms"],
            "median ms of the scheduler": got["median"],
        }  # fmt: skip
        found |= {f"{side}: {row}": [float(figure)] for row, figure in rows.items()}
    if {"offloading", "prefixloom"} <= by_side.keys():
        own, ours = by_side["offloading"], by_side["prefixloom"]
        hits = (ours["local"] + ours["external"]) / max(1, own["local"] + own["external"])
        found["prefixloom over offloading: hits"] = [hits]
        found["prefixloom over offloading: scheduler's time"] = [ours["seconds"] / own["seconds"]]
    return found
