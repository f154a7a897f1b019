"""Policies for prefixloom: an order of eviction that is learned, and rules for which states are worth a slot.

Read ``adaptive`` and ``states``. Each cites its source.
"""

from __future__ import annotations
