"""What the lab can do: how fast it replays a trace, and what each eviction policy hits there, beside the bound.

Read ``speed`` first. This room knows no engine and no peer.
"""
