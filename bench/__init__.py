"""The benchmarks: what the cache costs on this machine, beside another commit, and beside other caches.

The rooms, the lowest first. Each imports only from rooms that stand before it here; ``__main__`` may import all:

- ``runner``: processes that measure, the speed of the machine, medians and tables. It knows no workload.
- ``drivers``: how a cache manager is driven through requests: ours, SGLang's and vLLM's.
- ``foreign``: adapters of the same caches for the kit's tests of caches that are not ours. Nothing is measured there.
- ``beside``: the cache managers of vLLM and SGLang as the lab replays a trace with them.
- ``workloads``: what is measured of our own code. Most modules are also scripts.
- ``lab``: how fast the lab replays, and what policies hit on a trace of blocks.
- ``serving``: what the engine and the server cost, and what watching them adds.
- ``peers``: the same work done by our cache and by the peers' caches, compared row by row.

Read ``__main__`` first. ``docs/performance.md`` explains the commands and holds the results.
"""
