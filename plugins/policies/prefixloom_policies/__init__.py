"""Policies for prefixloom: orders of eviction, and rules for which states are worth a slot.

Each module is one policy and cites its source. ``cells`` is what the queues share. The package uses what any stranger's
policy may use: the seven calls of a queue, ``cell.node`` with its edge, and the views of states.
"""

from __future__ import annotations
