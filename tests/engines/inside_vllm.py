"""A pytest plugin for vLLM's own tests: every scheduler gets our connector.

A test whose scheduler has another connector keeps it only where that connector is itself what is tested. vLLM's own
host tier gets our order of eviction wherever it would have LRU. The report says of each test how often that was.

These tests have no workers. Each store fails as soon as it is sent, so nothing hits, and nobody waits for it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

KEPT = ("MultiConnector", "OffloadingConnector", "MockKVConnector", "DummyKVConnector")

placed = 0
"""How often ours was put in place since the present test began."""


def pytest_configure(config: Any) -> None:
    if os.environ.get("OURS_INSIDE") != "1":
        return
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.sched.scheduler import Scheduler

    from prefixloom_vllm.connector import PrefixloomConnector

    make = Scheduler.__init__

    def made(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        global placed
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector not in KEPT:
            placed += 1
            vllm_config.kv_transfer_config = KVTransferConfig(
                kv_connector="PrefixloomConnector",
                kv_connector_module_path="prefixloom_vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy=transfer.kv_load_failure_policy if transfer else "recompute",
                kv_connector_extra_config={"memory": "16MiB"},
            )
        make(self, vllm_config, *args, **kwargs)
        if isinstance(self.connector, PrefixloomConnector):
            fail_copies(self.connector, PrefixloomConnector(vllm_config, KVConnectorRole.WORKER, self.kv_cache_config))

    Scheduler.__init__ = made  # type: ignore[method-assign]

    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    from prefixloom_vllm.reach_policy import ReachPolicy

    find = CachePolicyFactory.get_cache_policy_cls

    def found(name: str, module_path: str | None = None) -> Any:
        global placed
        placed += name == "lru"
        return ReachPolicy if name == "lru" else find(name, module_path)

    CachePolicyFactory.get_cache_policy_cls = staticmethod(found)  # type: ignore[method-assign, assignment]


def fail_copies(scheduler: Any, worker: Any) -> None:
    """Let ``worker`` say of each copy that ``scheduler`` sends that it failed."""
    build = scheduler.build_connector_meta

    def built(scheduler_output: Any) -> Any:
        meta = build(scheduler_output)
        for copy in (*meta.plan.loads, *meta.plan.stores):
            worker.region.finish(copy.number, False)
        return meta

    scheduler.build_connector_meta = built


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    global placed
    placed = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: Any) -> None:
    item.user_properties.append(("ours", placed))
