"""How a cache manager is driven: one interface, a driver for each cache, and the conversations that all of them serve.

A driver does what the scheduler of its engine does with the cache, and nothing more. This room knows nothing about
clocks, rows or tables. Read ``interface`` first.
"""
