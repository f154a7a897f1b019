"""Laws that the state machine proves: every answer is what plain sets say, in all surroundings and under faults."""

from __future__ import annotations

from .case import ComponentCase, LawBroken
from .oracle.machine import Pit, fails, pasted, shrink, told
from .oracle.writer import Writer

LENGTH = 120
"""Operations of one script of the state machine."""
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
            script = Writer(f"{case.seed} {number} {seed}", pit.longest).script(LENGTH)
            failed = fails(pit, script)
            if failed is not None:
                short = shrink(pit, script, limit=6.0)
                again = fails(pit, short) or failed
                raise LawBroken(told(again).sentence, pasted(case, pit, short))
