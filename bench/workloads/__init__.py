"""What is measured of our own cache. A workload is a function that returns samples by row: ``python -m bench scale``.

``by_name`` lists the workloads of all rooms. Read it first.
Except for ``internals``, this room uses only the public names of prefixloom, because a workload must also run on other
commits. It knows nothing about the peers.
"""
