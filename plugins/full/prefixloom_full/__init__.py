"""Full attention for prefixloom: keys and values of every token of the path, or multi-head latents in their place.

Everything is in ``plugin``. The package knows the public names of ``prefixloom``. It knows no engine, no tensor and no
other plugin.
"""

from __future__ import annotations

from .plugin import FullComponent

__all__ = ["FullComponent"]
