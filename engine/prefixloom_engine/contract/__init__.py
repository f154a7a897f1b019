"""What the engine, its models and its clients agree on: protocols and plain data.

- ``model``     what a model offers the engine (``Model``, ``Runner``, ``Drafter``) and what one pass gets (``Batch``)
- ``memory``    where in the pools of a cache one layer of a model finds its entries
- ``requests``  what a client asks and gets
- ``handover``  what one engine passes to another about a prompt

Nothing here runs a model, plans a step or waits for anything, and nothing here knows another room of the engine.
Read ``model.py`` first.
"""
