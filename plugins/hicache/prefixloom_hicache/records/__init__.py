"""Records: what the stores of this package share, whatever they keep their bytes in.

It finds a record by fingerprint and content (``index``), and counts what a store answers (``counts``). It knows no
file, no thread and no policy of eviction. The format of a record as bytes is a part of ``prefixloom.storage``.

Read ``index`` first. The two modules do not import each other.
"""
