"""What serving costs: the engine beside plain batches, the server beside the engine, and what watching them adds.

Each module is a script of its own (``python -m bench.serving.server --help``). Read
``plain_batches`` first. This room must not know the peers.
"""
