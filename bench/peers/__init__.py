"""The comparison with the cache managers of SGLang and vLLM: the same work on every side, and who is faster.

``sides`` lists the sides, ``rows`` holds the work, ``compare`` runs it and judges the results, and ``tables`` prints.
No module here knows how a side works: ``bench.engines`` does. Read ``sides`` first, then ``rows``.
"""
