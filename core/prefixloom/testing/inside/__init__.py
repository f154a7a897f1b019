"""What tests read and write behind the cache's back: its private fields, and the bytes of its pools.

    backdoor   the private fields of caches, leases, sequences and steps: the only module that knows them
    names      a number for every prefix, which is also the checksum of its content
    memory     the content of a pool's slots as such numbers, byte by byte
    witness    compares what the cache restores with what live sequences computed

Read ``backdoor`` first. This room must not know components, laws or scripts, and imports no other room of the testing
package.
"""
