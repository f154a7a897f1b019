"""Compose: from a model's config to a wired cache.

``model_config`` reads the config, ``profiles`` finds which components serve its layers, and ``registry`` loads those
that are installed. ``capabilities`` makes the components and checks that they fit together, ``binding`` binds their
hooks, and ``sizing`` counts their pages and those of one sequence. ``entry`` leads through all of this, and ``build``
makes the pools, the lanes and the core.

An impossible set is refused by name before anything is allocated. This room must not know a component by name, and it
does no operation of a cache.

Read ``entry`` first, then ``build``, which shows how the parts of a cache are wired together.
"""
