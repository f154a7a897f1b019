"""Recurrent layers for prefixloom: states of linear attention, state spaces and short convolutions.

Read ``plugin`` first, the component. It imports ``states``, which reads the shapes of states from a model config. The
package knows the public names of ``prefixloom``. It knows no engine, no tensor and no other plugin.
"""

from __future__ import annotations

from .plugin import MambaComponent

__all__ = ["MambaComponent"]
