"""Beside: the lab's traces through the real cache managers of other engines, at the same bytes for the same model.

This room imports no engine. A peer is a class of ``PeerCache``, named ``module:Class``.

Read ``peer`` first: the contract. ``peer_replay`` drives a peer under the service that drives our cache, ``sides`` runs
all settings of a peer, and ``side_by_side`` makes the table and the counts that explain it.
"""
