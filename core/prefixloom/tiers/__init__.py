"""Tiers: a second place for cached data in the host's memory, and a store behind that.

``host_tier.LowerTier`` is what the core knows as ``Below``. Each component that shares its data has a ``host_lane``
beside its own lane, with cells at the same nodes. ``host_copies`` copies between the two, and has
the residency of both together. ``restore`` brings a prefix back to the device. ``store`` and the modules named after it
write to a store and read from it; ``consensus`` lets ranks agree on what a store has done.

The life of a piece, which is a page of one component or a state::

    device's cell   published, hit often, or about to be evicted -> backup: take slots, copy "down"    -> host's cell
    host's cell     copied, hit often, or about to be evicted    -> offer, pin, put on a thread        -> record
    record          a prompt is opened: search, then a slice     -> get on a thread, copy "fetch"      -> host's cell
    host's cell     a boundary is restorable: restore            -> pin, take slots, copy "up"         -> device's cell

Every copy is work in flight (``HostCopies.run``). Every call to a store ends at a poll, when all ranks know of it. What
fails on the way is taken out of the tree and counted, and the piece is computed again.

This room must not know what a component keeps, which store it talks to, or how a cache is composed.

Read ``host_tier`` first, then ``host_lane`` and ``restore``.
"""
