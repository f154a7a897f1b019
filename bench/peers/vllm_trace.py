"""A shared trace through vLLM's real scheduler, without a connector, with vLLM's own offloading, and with ours.

The forward passes are faked: a step answers with a token for each request that has reached the end of what is known,
and copies between the device and the host are over when the step is. All else is vLLM's: its scheduler, block pool,
caches of each kind, admission and preemption, and its own connector with its host tier's books. Each side gets the same
blocks on the device and the same bytes on the host.

Counted are the tokens that each side found, and the processor time of the thread that schedules: in ``add_request``,
``schedule`` and ``update_from_output``, where connectors do all their work. Run in vLLM's environment (docs/vllm.md):

    python -m bench.peers.vllm_trace --trace TRACE.jsonl.gz --model MODEL --groups full,window
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

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


@attrs.frozen
class Entry:
    """A request of a trace."""

    tokens: list[int]
    answer: int


def entries(trace: Path, count: int, block: int, scale: int, answer: int) -> Iterator[Entry]:
    """The first requests of a trace, with ``scale`` times fewer tokens. An id names a block's tokens."""
    size = block // scale
    numbers: dict[int, int] = {}
    with gzip.open(trace, "rt") as lines:
        for _, line in zip(range(count), lines, strict=False):
            told = json.loads(line)
            blocks = [numbers.setdefault(each, len(numbers)) for each in told["hash_ids"]]
            tokens = [one for each in blocks for one in range(each * size, each * size + size)]
            length = max(1, min(len(tokens), told["input_length"] // scale, LONGEST - answer - 1))
            yield Entry(tokens[:length], max(1, min(answer, told["output_length"] // scale)))


BLOCK_BYTES = 4096
"""Of a block on the host. vLLM's own tier rounds up to this."""


def groups_of(scene: Scene) -> KVCacheConfig:
    """Groups of one layer whose blocks have the same bytes, as vLLM makes them."""
    kv = {"block_size": scene.page, "num_kv_heads": 1, "dtype": torch.bfloat16}
    kv["head_size"] = BLOCK_BYTES // (scene.page * 2 * 2)
    specs = {
        "full": lambda: FullAttentionSpec(**kv),
        "window": lambda: SlidingWindowSpec(**kv, sliding_window=scene.window),
        "state": lambda: MambaSpec(
            block_size=scene.page, shapes=((BLOCK_BYTES // 2,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
        ),
    }  # fmt: skip
    groups = [KVCacheGroupSpec([f"{at}.{each}"], specs[each]()) for at, each in enumerate(scene.groups)]
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


def run(side: str, scene: Scene, asked: list[Entry]) -> dict[str, Any]:
    """Serve all requests, ``scene.running`` at a time, and count."""
    init_none_hash(sha256)
    scheduler, config, kv_cache_config = scheduler_of(side, scene)
    worker = CopiesThatEnd(side, scheduler, config, kv_cache_config)
    hasher = get_request_block_hasher(scheduler.hash_block_size, sha256)
    requests = deque(enumerate(asked))
    gc.collect()
    gc.freeze()  # what is there is not looked at again, as in vLLM's engine
    found = {"side": side, "requests": len(requests), "prompt": sum(len(each.tokens) for each in asked)}
    local = external = steps = open_requests = 0
    times: list[float] = []
    spent = 0.0
    clock = time.thread_time
    while requests or scheduler.has_unfinished_requests():
        while requests and open_requests < scene.running:
            number, asks = requests.popleft()
            begun = clock()
            request = Request(  # it hashes its blocks at once
                request_id=str(number), prompt_token_ids=asks.tokens, pooling_params=None, block_hasher=hasher,
                sampling_params=SamplingParams(max_tokens=asks.answer, ignore_eos=True),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", required=True, help="a folder with a config.json; its sizes are not used")
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the trace")
    parser.add_argument("--scale", type=int, default=8, help="how many times fewer tokens")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer, at most")
    parser.add_argument("--groups", default="full")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--device", type=int, default=2000, help="blocks on the device")
    parser.add_argument("--host", type=int, default=4000, help="blocks' bytes on the host")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--sides", default="none,offloading,prefixloom")
    parser.add_argument("--shm", default="/dev/shm")
    told = parser.parse_args()
    torch.set_num_threads(1)
    asked = [*entries(told.trace, told.requests, told.block, told.scale, told.answer)]
    scene = Scene(
        told.model, tuple(told.groups.split(",")), told.page, told.window, told.device, told.host * BLOCK_BYTES,
        told.running, told.budget, told.shm,
    )  # fmt: skip
    first: dict[str, Any] = {}
    print("| side | found on the device | and on the host | of the prompts | ms of the scheduler a request | median |")
    print("|---|---|---|---|---|---|")
    for side in told.sides.split(","):
        got = run(side, scene, asked)
        first[side] = got
        share = (got["local"] + got["external"]) / got["prompt"]
        print(
            f"| {side} | {got['local']} | {got['external']} | {share:.4f} | {got['ms']:.2f} | {got['median']:.2f} |",
            flush=True,
        )
    if "offloading" in first and "prefixloom" in first:
        own, ours = first["offloading"], first["prefixloom"]
        hits = (ours["local"] + ours["external"]) / max(1, own["local"] + own["external"])
        print(f"hits {hits:.3f} of vLLM's own, scheduler's time {ours['seconds'] / own['seconds']:.3f} of its")


if __name__ == "__main__":
    main()
