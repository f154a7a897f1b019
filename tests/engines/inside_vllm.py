"""A pytest plugin for vLLM's own tests: every scheduler that has prefix caching gets our connector.

A test whose scheduler has another connector keeps it only where that connector is itself what is tested.
"""

from __future__ import annotations

import os
from typing import Any

KEPT = ("MultiConnector", "OffloadingConnector", "MockKVConnector", "DummyKVConnector")


def pytest_configure(config: Any) -> None:
    if os.environ.get("OURS_INSIDE") != "1":
        return
    from vllm.config import KVTransferConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.__init__

    def made(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if vllm_config.cache_config.enable_prefix_caching and (transfer is None or transfer.kv_connector not in KEPT):
            vllm_config.kv_transfer_config = KVTransferConfig(
                kv_connector="PrefixloomConnector",
                kv_role="kv_both",
                kv_load_failure_policy=transfer.kv_load_failure_policy if transfer else "recompute",
                kv_connector_extra_config={"memory": "16MiB"},
            )
        make(self, vllm_config, *args, **kwargs)

    Scheduler.__init__ = made  # type: ignore[method-assign]
