"""Knowledge: what a router knows of the caches and of the load of its replicas.

Its first source is the events of each replica (``followed``). They may be missing, late, or wrong. Then the router goes
by what it sent to the replica itself (``sent_prompts``). An answer is right in any case, since a replica looks for
itself at what it has; only the choice is worse. This room knows no process and no HTTP, and imports nothing of Ray.

Read ``replicas`` first.
"""
