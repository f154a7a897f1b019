"""prefixloom inside vLLM: a host tier below its device cache, as a KV connector.

vLLM's own cache keeps blocks on the device. This connector keeps in the host's memory what was computed, and a store
behind it, and brings it back when a prompt needs it. One prefixloom cache has the books: it knows every kind of block
(attention, windows, states) by its reach, so a hit, a lock and an eviction agree about all of them.

Read in this order:

``groups``     what vLLM's cache groups are for us: a component for each, with its reach and its bytes
``options``    what ``kv_connector_extra_config`` may say
``region``     the shared memory that the scheduler and the workers map
``books``      scheduler: the host's slots, what is in them, and the store behind them
``scheduler``  scheduler: which request loads and stores what, and when
``events``     scheduler: what the host has, announced as vLLM's KV events
``worker``     worker: the copies between vLLM's memory and the region
``connector``  the class that vLLM makes, which hands its calls to the two sides
``figures``    the counts, in vLLM's form
``versions``   the check that vLLM's interface is the one that this was written for

Beside all this stands ``reach_policy``: an order of eviction for vLLM's own host tier.
"""

from __future__ import annotations


def register() -> None:
    """Make the connector known to vLLM. The entry point in ``vllm.general_plugins``; it may be called twice."""
    from contextlib import suppress

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector("PrefixloomConnector", "prefixloom_vllm.connector", "PrefixloomConnector")
