"""Random scripts for an adapted cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...script import Writer, text_of

WEIGHTS = {
    "open": 9, "pass": 22, "device": 14, "result": 6, "turn": 6, "crowd": 2, "finish": 6, "abort": 2, "retract": 2,
    "evict": 3,
}  # fmt: skip


ARGUMENTS: dict[str, Callable[[Any], tuple[object, ...]]] = {
    "open": lambda w: (w.prompt(), w.chance.choice(("", "", "", "", "b")), w.below(4)),
    "evict": lambda w: (w.chance.choice((1, w.unit, 4 * w.unit, 1000)),),
    **dict.fromkeys(("finish", "abort", "retract"), lambda w: (w.below(4),)),
}
"""By verb: what its arguments are drawn from."""


class ForeignWriter(Writer):
    """Writes scripts for the world of an adapted cache."""

    weights, arguments = WEIGHTS, ARGUMENTS

    def prompt(self) -> tuple[int, ...]:
        near = self.chance.choice((-1, 0, 0, 1, 1, 2))
        length = max(1, self.chance.randrange(1, 8) * self.unit + near)
        return self.varied(text_of(self.below(3))[:length], 3, letters=3)

    def write_turn(self) -> None:
        """Write a request alone, from its beginning to its end."""
        self.write("open")
        for _ in range(3):
            self.say("pass", ((-1, self.chance.choice((self.unit, 2 * self.unit, 8 * self.unit))),))
        for _ in range(self.below(2 * self.unit)):
            self.say("pass", ((-1, 1),))
        self.say("finish", -1)

    def write_crowd(self) -> None:
        """Write several long prompts at once: more than a tight pool has room for."""
        prompts = [(*text_of(self.below(2))[: self.chance.randrange(4, 7) * self.unit], each) for each in range(3)]
        for prompt in prompts:
            self.say("open", prompt, "", self.below(4))
        for _ in range(6):
            self.say("pass", tuple((each, self.unit) for each in self.chance.sample(range(4), 4)))
        self.say("open", prompts[0], "", 0)
        self.say("pass", ((-1, 8 * self.unit),))

    def write_pass(self) -> None:
        unit = self.unit
        counts = (1, 2, unit, unit, unit + 1, 2 * unit, 3 * unit, 8 * unit)
        numbers = self.chance.sample(range(4), self.chance.choice((1, 1, 2, 3, 4)))
        made = tuple((each, self.chance.choice(counts)) for each in numbers)
        for _ in range(self.chance.choice((1, 1, 1, 2, 4))):
            self.say("pass", made)
