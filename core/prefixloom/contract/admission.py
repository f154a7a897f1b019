"""Admission: which states the tree takes, and which of a path go first where it may have only so many.

A policy sees frozen views of single states and knows no tree, no pool and no component. It is asked before anything
moves, or after all has; what it does wrong is counted, and the state is taken as if nobody had been asked.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..errors import CompositionError


@attrs.frozen
class StateView:
    """A state as an admission policy sees it: one that could be kept, or one that is.

    ``component``  whose state it is
    ``namespace``  where it was, or would be, published
    ``boundary``   the tokens that it stands for
    ``above``      the deepest boundary above it on its path that has a state; 0: there is none
    ``kept``       how many boundaries above it have one
    ``at_branch``  prompts part here: the match said so, or the tree does
    ``last``       the sequence ends, and this is the deepest state that it leaves
    """

    component: str
    namespace: str
    boundary: int
    above: int = 0
    kept: int = 0
    at_branch: bool = False
    last: bool = False


@attrs.frozen
class AdmissionPolicy:
    """Which states are worth a slot of the tree; both answers may depend on the view alone.

    ``admit``  whether the tree takes a state that a sequence publishes; None: every one
    ``worth``  where a path may have only so many states (``states_per_path``), the one that is worth least goes, the
               nearest to the new one among equals; None: the nearest, and never one where prompts part
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
