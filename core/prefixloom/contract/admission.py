"""Admission: which states the tree takes, and which state of a path it drops when the path has too many.

A policy sees frozen views of single states and knows no tree, no pool and no component. The core asks it before
anything moves, or after everything has moved. An error of a policy is counted, and the state is taken as without one.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..errors import CompositionError
from ..keys.tokens import Span


@attrs.frozen
class StateView:
    """A state as an admission policy sees it, which the tree has or may take (docs/hooks.md)."""

    component: str
    namespace: str
    boundary: int
    above: int = 0
    kept: int = 0
    at_branch: bool = False
    last: bool = False
    extra: tuple[Span, ...] = ()
    prompt_end: bool = False


@attrs.frozen
class AdmissionPolicy:
    """A rule for which states are worth a slot of the tree. Both functions may depend on the view alone.

    ``admit``  whether the tree takes a state that a sequence publishes; None: it takes every state
    ``worth``  the value of a state on a path with too many (``states_per_path``). The state of the lowest value is
               dropped; among equal values, the one nearest to the new state. None: the nearest state is dropped, and
               never one where prompts diverge
    """

    name: str
    admit: Callable[[StateView], bool] | None = None
    worth: Callable[[StateView], float] | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise CompositionError(f"an admission policy needs a name, got {self.name!r}")
        for answer in ("admit", "worth"):
            function = getattr(self, answer)
            if function is not None and not callable(function):
                raise CompositionError(
                    f"admission policy {self.name!r}: {answer} must be a function of a StateView, got {function!r}"
                )


ADMISSIONS: dict[str, AdmissionPolicy] = {
    policy.name: policy
    for policy in (
        AdmissionPolicy("all"),
        AdmissionPolicy("branch-and-last", admit=lambda state: state.at_branch or state.last),
    )
}
"""The built-in policies by name."""
