"""What serving costs: the engine beside plain batches, the server beside the engine, and what watching them adds.

Read ``server`` first. This room must not know the peers.
"""
