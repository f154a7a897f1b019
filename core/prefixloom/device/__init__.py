"""Device: memory in slots, the kernels that move it, and the work that is in flight.

A ``pool`` owns the tensors of one component and hands out slots; ``host_pool`` is its counterpart in the host's memory.
``layouts`` and ``codecs`` say how content lies there, and the ``kernels`` modules copy it. ``streams`` run work in
order beside the scheduling thread. ``flight`` numbers the work that is not over, ``race`` finds accesses without an
order, and ``timeline`` says when what runs beside the operations began and ended. ``tables`` are the page tables that
kernels read.

This room must not know a tree, a cell or a sequence, and not why a slot is taken. It knows slots by number only.

Read ``pool`` first, then ``flight``, which explains fences.
"""
