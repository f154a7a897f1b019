"""Forward: what runs on the forward stream, and the plain data that the planning thread sends there.

- ``jobs``      a request while the engine works on it (``Job``), and what one step computes of it (``PlannedRow``)
- ``stream``    launches a planned step on the stream, and waits for it
- ``passes``    one forward pass over a group of rows, and the sampling after it
- ``drafting``  guesses of a draft model, made and kept on the device
- ``handover``  copies of content between the pools and what engines hand to each other

This room must not know why a row was planned: admission, ranks and retraction are ``serving``'s. Read ``stream.py``
first.
"""
