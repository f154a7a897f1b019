"""The lowest room: it runs functions in processes of their own, and summarizes the samples that they return.

It knows neither what is measured nor by which cache: callers pass the name of a function, such as
``bench.peers.rows:measure``, and its arguments. Read ``side`` first.
"""
