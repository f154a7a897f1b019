"""What the laws of components stand on: a case, a bench that serves it, and scripts that are played on the bench.

    truth      ``Truth``: what the layers do, said without the component; imports neither torch nor pytest
    case       ``ComponentCase``, and how a broken law is reported; imports neither torch nor pytest
    watching   layers that are run to find out what they read and write
    probes     the boundaries at which a reach is asked
    answers    what a component says, here and in another process
    machines   what differs between two machines
    spy        a component in the place of another, which watches its hooks
    bench      a cache with the case's component, and a forward pass that reads and writes known content
    scripts    the world of content, on which scripts are played, and its writer
    outcomes   the scripts that failed with one case, which several laws judge

Read ``case``, then ``bench``. This room must not know any law or the oracle; it imports ``inside``, ``schedules`` and
``toy``.
"""
