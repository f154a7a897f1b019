"""Records: what the stores of this package share, whatever they keep their bytes in.

It turns a record into bytes and back (``frame``), finds a record by fingerprint and content (``index``), and counts
what a store answers (``counts``). It knows no file, no thread and no policy of eviction.

Read ``frame`` first. The three modules do not import each other.
"""
