"""Admission: which states the tree takes.

A policy sees frozen views of single states and knows no tree, no pool and no component. The core asks it before
anything moves. An error of a policy is counted, and the state is taken as without one.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..keys.tokens import Span
from .checks import function, typed


@attrs.frozen
class StateView:
    """A state that the tree may take, as an admission policy sees it (docs/hooks.md)."""

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
    """A rule for which states are worth a slot of the tree.

    ``admit`` says whether the tree takes a state that a sequence publishes, and may depend on the view alone. None: the
    tree takes every state.
    """

    name: str = attrs.field(validator=typed(str))
    admit: Callable[[StateView], bool] | None = attrs.field(default=None, validator=function)


ADMISSIONS: dict[str, AdmissionPolicy] = {
    policy.name: policy
    for policy in (
        AdmissionPolicy("all"),
        AdmissionPolicy("branch-and-last", admit=lambda state: state.at_branch or state.last),
    )
}
"""The built-in policies by name."""
