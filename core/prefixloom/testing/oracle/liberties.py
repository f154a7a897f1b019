"""What a component's hooks and policies leave open: where the sets cannot say what comes, only what may.

Everything here follows from which hooks are overridden; what they answer is never looked at. A component without hooks
leaves nothing open.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs


@attrs.frozen
class Liberties:
    """Of a whole composition. The sets hold names of components.

    ``narrows``  a boundary that can be resumed at may be refused, and room for more than is derived be asked for
    ``keeps``    of a publication less may come into the tree than could
    ``drops``    a split may lose a state
    ``widens``   leases may cover more than resuming needs
    """

    narrows: bool = False
    keeps: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    widens: frozenset[str] = frozenset()

    @classmethod
    def of(cls, parts: Iterable[Any], admitting: bool = False) -> Liberties:
        """Those of a composition's parts; ``admitting``: it has an admission policy of its own."""
        overridden = {part.name: frozenset(part.hooks.overridden) for part in parts}

        def having(*hooks: str) -> frozenset[str]:
            return frozenset(name for name, found in overridden.items() if found & set(hooks))

        selective = {part.name for part in parts if part.manifest.admission is not None or admitting}
        return cls(
            bool(having("create_match_validator", "finalize_match_result")),
            having("commit_insert") | selective,
            having("redistribute_on_node_split"),
            having("acquire_component_lock"),
        )
