"""What is measured of our own code. Each workload is a module, and a script: ``python -m bench.workloads.scale``.

``by_name`` lists the workloads of ``python -m bench`` and turns their results into samples by row. Read it first.
Except for ``internals``, this room uses only the public names of prefixloom, because a workload must also run on other
commits. It knows nothing about the peers.
"""
