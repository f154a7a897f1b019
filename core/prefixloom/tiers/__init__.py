"""Tiers: a second place for cached data in the host's memory, and a store behind that.

``host_tier.LowerTier`` is what the core knows as ``Below``. Each component that shares its data has a ``host_lane``
beside its own lane, with cells at the same nodes. ``host_copies`` copies between the two, and has
the residency of both together. ``restore`` brings a prefix back to the device. ``store`` and the modules named after it
write to a store and read from it; ``consensus`` lets ranks agree on what a store has done.

This room must not know what a component keeps, which store it talks to, or how a cache is composed.

Read ``host_tier`` first, then ``host_lane`` and ``restore``.
"""
