"""``ThreeWay``: the built-in model. Its weights are random, so that nothing has to be downloaded.

- ``model``       the model, its config, its draft, and how they are bound to a cache
- ``layers``      attention and the gated delta rule as layers
- ``delta_rule``  the mathematics of the gated delta rule

This room knows tensors and the pools' rows. It must not know requests, steps or streams. Read ``model.py`` first.
"""

from __future__ import annotations

from .layers import Sizes
from .model import SIZES, BoundThreeWay, ThreeWay

__all__ = ["SIZES", "BoundThreeWay", "Sizes", "ThreeWay"]
