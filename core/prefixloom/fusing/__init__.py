"""Fusing: functions of a composition's own, made from the sources of those that are marked (``straight``).

What executes the way of a request is written once, for any composition: it goes over lanes and asks whether there is a
tier. When a cache is composed the answers are known. Of each operation a function is made from the sources: loops over
lanes are unrolled, marked functions stand in the place of calls to them, what is known is written in, and questions
that are answered by it are not asked. Nothing else changes. The source is what is to be read and debugged; it is what
runs in debug mode, and wherever the sources are not to be had.

Nothing here knows what the functions do. What is known of a composition is said in ``fused``.
"""

from .fuser import Fuser
from .known import Const, Each, Items, Row, Thing, Unable

__all__ = ["Const", "Each", "Fuser", "Items", "Row", "Thing", "Unable"]
