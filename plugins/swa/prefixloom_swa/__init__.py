"""Sliding-window and chunked attention for prefixloom: keys and values of which only the last ones are needed.

Everything is in ``plugin``. The package knows the public names of ``prefixloom``. It knows no engine, no tensor and no
other plugin.
"""

from __future__ import annotations

from .plugin import SwaComponent

__all__ = ["SwaComponent"]
