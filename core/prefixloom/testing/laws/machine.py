"""Laws that scripts of the sets prove: every answer equals the oracle's, in all compositions and under faults."""

from __future__ import annotations

from ...script import failure
from ..kit.case import ComponentCase
from ..kit.outcomes import FailedScript, judge
from ..oracle import faults
from ..oracle.writer import Pit, SetsWriter
from .hooks import COUNTED, FAIL, quiet

LENGTH = 120
"""How many operations a script of the sets has."""
FAULTY = 20
"""How many random operations follow the chosen ones in the script of faults."""
PITS = ((), ("path",), ("window", "state"))
"""The companions that the component is composed with."""


def law_every_answer_is_what_the_sets_say(case: ComponentCase) -> None:
    """After any operations, what is cached, kept, refused, evicted and answered equals what the oracle's sets say.

    Clauses: R9, R14, P5, P6, I3, L2, E2, M6, M7.
    """
    pits = [Pit(case, beside) for beside in PITS]
    pits.append(Pit(case, ("path",), lent=True))
    if case.manifest.page_size is None and case.manifest.tokens_per_slot == 1:
        pits.append(Pit(case, page=1, units=44))
    for number, pit in enumerate(pits):
        for seed in range(case.effort):
            script = SetsWriter(f"{case.seed} {number} {seed}", pit).script(LENGTH)
            failed = failure(pit, script)
            if failed is not None:
                judge(case, [FailedScript(failed.topic, failed.sentence, tuple(script), pit)])


def law_a_fault_at_any_step_leaves_the_state_before_or_after(case: ComponentCase) -> None:
    """Whenever a hook raises, a pool is empty or a step fails, nothing is half done, and the cache goes on.

    Clauses: H9, H10, P6, I5, L4, W5, X5.
    """
    pit = Pit(case, ("window",))
    script = faults.walkthrough(pit.unit) + SetsWriter(f"{case.seed} faults", pit).script(FAULTY)
    with quiet():
        for hook in (*FAIL, *COUNTED):
            faults.in_hook(pit, hook, script)
        faults.in_pools(pit, script)
        faults.in_layers(pit, faults.walkthrough(pit.unit))
