"""Laws that the state machine proves: every answer is what plain sets say, in all surroundings and under faults."""

from __future__ import annotations

from .case import ComponentCase, LawBroken
from .laws_of_hooks import COUNTED, FAIL, quiet
from .oracle import faults
from .oracle.machine import Pit, fails, pasted, shrink, told, written

LENGTH = 120
"""Operations of one script of the state machine."""
FAULTY = 20
"""Random operations that follow on those that are chosen, of which each fails in every way."""
PITS = ((), ("path",), ("window", "state"))
"""What the component is composed with."""


def law_every_answer_is_what_the_sets_say(case: ComponentCase) -> None:
    """Whatever is done in whatever order, what is cached, kept, refused, evicted and answered is what plain sets say.

    Clauses: R9, R14, P5, P6, I3, L2, E2, M8, M9, M10, M13.
    """
    pits = [Pit(case, beside) for beside in PITS]
    if case.manifest.page_size is None and case.manifest.tokens_per_slot == 1:
        pits.append(Pit(case, page=1, units=44))
    for number, pit in enumerate(pits):
        for seed in range(case.effort):
            script = written(f"{case.seed} {number} {seed}", pit, LENGTH)
            failed = fails(pit, script)
            if failed is not None:
                short = shrink(pit, script, limit=6.0)
                again = fails(pit, short) or failed
                raise LawBroken(told(again).sentence, pasted(case, pit, short))


def law_a_fault_at_any_step_leaves_the_state_before_or_after(case: ComponentCase) -> None:
    """A hook that raises, a pool that is dry, a step that fails: wherever it is, nothing is half done, and all goes on.

    Clauses: H9, H10, P6, I5, L5, W5, X5.
    """
    beside = ("window",)
    pit = Pit(case, beside)
    script = faults.walkthrough(pit.unit) + written(f"{case.seed} faults", pit, FAULTY)
    with quiet():
        for hook in (*FAIL, *COUNTED):
            faults.in_hook(case, beside, hook, script)
        faults.in_pools(case, beside, script)
        faults.in_layers(case, beside, faults.walkthrough(pit.unit))
