"""Tree: the radix tree of keys, and what each component keeps at its nodes.

``keys`` turns tokens into bytes, and ``radix`` compares these bytes and knows nothing else. A ``lane`` is one
component's way through the core: its cells at the nodes, its eviction queue and its pool. There is one lane for each
kind of reach: ``path_lane``, ``partial_lane`` for any other positions, and ``state_lane``.
``holdings`` are what a running request has of one component. ``paged_reach`` remembers what a reach says of pages,
``journal`` records what cells come to hold and lose, and ``expiries`` knows until when somebody wants them.

A lane must not know another component, a plugin's name, a running request or a tier. This room never calls a hook.

Read ``lane`` first, then ``path_lane``, the simplest complete one, then ``partial_lane`` and ``state_lane``.
"""
