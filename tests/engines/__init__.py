"""Real engines with our cache inside: their environments, and tiny models for them.

Nothing in here is collected by pytest: an engine takes 10 to 60 seconds to start. ``environment`` runs in the project's
own environment; ``models`` and ``converse_sglang`` run in the environment of an engine.
"""
