"""Order and time under a test's control: streams and schedules.

    simulated      streams whose work runs when a test says so
    interleaving   which orders of events must still be tried (partial-order reduction)
    explore        runs a scenario in all orders
    watch          tells the explorer what a cache's work touches

Read ``simulated``, then ``explore``. This room must not know components or laws; of the testing package it imports only
``inside``.
"""
