"""The laws: plain functions of a case, whose names say what must hold.

    facts       a component's identity, manifest, reach and pool
    options     its name, its options, and what it makes of a model's config
    hooks       what hooks may look at, touch and answer
    service     a component's memory while requests are served
    machine     every answer equals the oracle's, also under faults
    schedules   steps that are planned and not yet run
    storage     stores: the case, the laws, and what runs them
    policies    eviction policies: the case and the laws
    admission   admission policies: the case and the laws

Read ``facts`` first. A law must not know a component by name; this room imports all others, and only the front modules
of ``prefixloom.testing`` import it.
"""
