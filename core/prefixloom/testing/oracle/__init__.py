"""The oracle: a prefix cache as plain sets, and the world of scripts that are done to a cache and to the sets.

    sets                  the model: facts of components, and what is resident, as sets
    view                  reads a cache's tree into plain data and compares its content
    comparison            one cache beside the sets, and everything that is compared after each operation
    sequence_operations   the operations on an open sequence
    operations            all other operations
    writer                random scripts, and ``Pit``, where they are played
    faults                scripts in which each fallible point fails once

Read ``sets`` first. This room must not know any law; it imports ``kit`` and ``inside``.
"""
