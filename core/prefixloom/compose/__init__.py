"""Compose: from a model's config to a wired cache.

``model_config`` reads the config, ``profiles`` finds which components serve its layers, and ``registry`` loads those
that are installed. ``capabilities`` checks that a set of components fits together, ``sizing`` counts their pages,
``needs`` those of one sequence, and ``binding`` binds their hooks. ``entry`` leads through all of this, and ``build``
makes the pools, the lanes and the core.

An impossible set is refused by name before anything is allocated. This room must not know a component by name, and it
does no operation of a cache.

Read ``entry`` first, then ``build``, which shows how the parts of a cache are wired together.
"""
