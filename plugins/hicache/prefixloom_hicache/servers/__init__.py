"""Stores on servers: Redis, object stores and Mooncake, which several engines share.

A server keeps values under names, and says nothing of what they are. ``server_store`` makes a store of any such server:
a record is one value, its header in front of its payload, under the name that its address gives.

| module | for |
|---|---|
| ``server_store``    | a store of records, over the values of a server |
| ``values``          | what a server must offer for that |
| ``write_memory``    | values in one piece, for the clients that need it |
| ``redis_values``    | ``redis://``, ``rediss://``: Redis, Valkey |
| ``object_values``   | ``s3://``, ``gs://``, ``az://``: object stores, through ``obstore`` |
| ``mooncake_values`` | ``mooncake://``: Mooncake Store |
| ``schemes``         | how each is offered to the registry |

No client of a server is imported before a store of it is opened. Read ``server_store`` first.
"""

from __future__ import annotations

from .server_store import ServerStore
from .values import Full, Values

__all__ = ["Full", "ServerStore", "Values"]
