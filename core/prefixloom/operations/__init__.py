"""Operations: the state that all operations of a cache share, and the operations themselves.

``state`` has the owners: ``Shape``, ``Index``, ``Match``, ``Hold``, ``Running`` and ``Core``. An operation is a
function that takes the core as its first argument: ``match``, ``open``, ``lease``, ``room`` (grow and evict), ``step``,
``retain`` (commit and rewind), ``publish``, ``insert`` (of an engine that lends its slots), and ``teardown`` for
everything that ends early. Every call of a hook goes through ``plugin_calls``.

This room must not know what a component keeps: it asks the lanes, in the order of the composition. It must not know
the faces that an engine holds, nor which tier or debug mode stands above it: it knows the protocols ``Below`` and
``Watcher`` only.

Read ``state`` first, then ``match``, ``open`` and ``publish``.
"""
