"""``prefixloom demo``: conversations through a model, answered with a cache and without.

- ``command``        the console command
- ``settings``       its options
- ``comparison``     runs the conversations through both engines
- ``conversations``  the prompts
- ``exactness``      checks that the cache changed nothing
- ``text``, ``html_report``, ``progress``  what the command prints, writes and shows meanwhile

This room uses the engine as any program would. No other room may import it. Read ``comparison.py`` first.
"""
