"""Admission of states: which boundaries deserve a checkpoint. Each rule is a function of the view of one state.

Sources: Pan and others, "Marconi: Prefix Caching for the Era of Hybrid LLMs" (MLSys 2025): states are worth their
memory at the end of what is shared by many (a branch), and at the end of a sequence, which its next turn goes on
from; all other states are seldom used. SGLang keeps a state one page before the end as well, since a prompt that is
asked again may hit at most all but its last token: the boundary that a publication offers last of all is that one.

``ends``      where a sequence ends, and nowhere else: chats that are never edited and share no long beginning
``prompts``   where the prompt ends, and nowhere else: one state for each request, as vLLM's default keeps it. The
              next turn parts there if its chat template drops the reasoning from the answer
``branches``  Marconi's rule: where prompts part, and where a sequence ends
``spaced``    these, and others that lie at least ``SPACE`` tokens below the state above: a bound on what is computed
              again, for as many states as that takes
``by-cost``   these, and others for which the work that a hit saves over the state above exceeds ``SHARE`` of all work
              down there: so states lie close at the front and ever further apart, a number that grows with the
              logarithm of the length
"""

from __future__ import annotations

from prefixloom import AdmissionPolicy, StateView, hookimpl

SPACE = 4096
SHARE = 0.25
KNEE = 24576
"""The depth at which attention costs as much as the weights."""


def work(tokens: int) -> float:
    """Return the work to compute so many tokens from the front, in tokens without attention."""
    return tokens * (1 + tokens / (2 * KNEE))


def saved(state: StateView) -> float:
    """Return the work that the state saves over the state above it."""
    return work(state.boundary) - work(state.above)


def at_end(state: StateView) -> bool:
    return state.last


def at_prompt_end(state: StateView) -> bool:
    return state.prompt_end


def at_branch_or_end(state: StateView) -> bool:
    return state.last or state.at_branch


def far_below(state: StateView) -> bool:
    return at_branch_or_end(state) or state.boundary - state.above >= SPACE


def saves_enough(state: StateView) -> bool:
    return at_branch_or_end(state) or saved(state) >= SHARE * work(state.boundary)


class StateRule:
    """An entry point's target for one rule."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy

    @hookimpl
    def prefixloom_admission(self) -> AdmissionPolicy:
        return self.policy


ends = StateRule(AdmissionPolicy("ends", admit=at_end))
prompts = StateRule(AdmissionPolicy("prompts", admit=at_prompt_end))
branches = StateRule(AdmissionPolicy("branches", admit=at_branch_or_end))
spaced = StateRule(AdmissionPolicy("spaced", admit=far_below))
by_cost = StateRule(AdmissionPolicy("by-cost", admit=saves_enough))
