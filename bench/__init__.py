"""The benchmarks: what the cache costs on this machine, beside another commit, and beside other caches.

The rooms, the lowest first. Each imports only from rooms that stand before it here; ``__main__`` may import all:

- ``runner``: processes that measure, the speed of the machine, medians and tables. It knows no workload.
- ``engines``: one adapter for each engine, as a driver of rows, for the kit and for the lab. Nothing is measured there.
- ``workloads``: what is measured of our own cache, and the list of all workloads.
- ``lab``: how fast the lab replays, and what policies hit on a trace of blocks.
- ``serving``: what the engine and the server cost, and what watching them adds.
- ``peers``: the same work done by our cache and by the peers' caches, compared row by row; traces through the
  schedulers of SGLang and vLLM with their caches and with ours.

A workload is a function that returns samples by row, and its parameters are the command's options. Read ``__main__``
first. ``docs/performance.md`` explains the commands and holds the results.
"""
