"""Tree: the radix tree of keys, and what each component keeps at its nodes.

``radix`` compares bytes of keys and knows nothing else. ``cells`` are what one component keeps at the nodes, in one
pool and one eviction queue, on any tier. A ``lane`` is such cells on the device with one component's way through the
core. There is one lane for each kind of reach: ``path_lane``, ``partial_lane`` for any other positions, and
``state_lane``.
``holdings`` are what a running request has of one component. ``paged_reach`` remembers what a reach says of pages,
``journal`` records what cells come to hold and lose, and ``expiries`` knows until when somebody wants them.

A lane must not know another component, a plugin's name, a running request or a tier. This room never calls a hook.

Read ``cells`` and ``lane`` first, then ``path_lane``, the simplest complete one, ``partial_lane`` and ``state_lane``.
"""
