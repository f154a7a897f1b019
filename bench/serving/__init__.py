"""What serving costs: the server beside the engine, what watching them adds, and a fleet beside its simulation.

Read ``server`` first. This room must not know the peers.
"""
