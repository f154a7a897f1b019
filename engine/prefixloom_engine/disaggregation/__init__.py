"""Disaggregation: one process computes prompts, another decodes, and what the first computed travels to the second.

- ``decode_engine``   the side that clients ask
- ``prefill_peer``    one prefill process, as that side knows it
- ``prefill_server``  the side that computes prompts
- ``around``          what both sides leave to the engine in their process
- ``messages``        what both say, as JSON, and the checks of what comes
- ``records``         content in the format of the stores, and the checks of what comes
- ``arrival``         the content of one answer while it comes
- ``transport``       the contract of transports, and of movers
- ``in_process``      a transport between two engines of one process
- ``nixl_mover``      a mover of content between processes
- ``zmq_transport``   a transport between processes; ``addresses`` and ``keys`` say who may be at its other end

This room drives engines through their public names alone. It must not know how a step is planned, nor what a component
keeps. Read ``transport.py`` first, and then ``decode_engine.py``.
"""

from __future__ import annotations

from .decode_engine import DecodeEngine
from .in_process import in_process_pair
from .prefill_server import PrefillServer

__all__ = ["DecodeEngine", "PrefillServer", "in_process_pair"]
