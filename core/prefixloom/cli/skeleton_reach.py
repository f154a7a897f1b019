"""The option ``--reach``, translated into the code of a component's reach and of what a test's layers read."""

from __future__ import annotations

import attrs

from ..errors import InputError

KV = (("k", (2, 8), "bfloat16"), ("v", (2, 8), "bfloat16"))
STATE = (("h", (4, 8), "float32"),)
CUSTOM = '''

class {title}Reach(Reach):
    """The last 8 positions, the query's own included, written out: replace this by what your layers read."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        """What must be present so that the token at n can be computed next."""
        return ((max(0, n - 7), n),) if n else ()

    def until(self, p: int) -> float:
        """The last boundary that needs position p; without this method nothing is given back early."""
        return p + 7
'''
SHAPES = {"path": 0, "point": 0, "custom": 0, "window": 1, "sinks": 1, "chunk": 1, "tail": 2}
"""How many numbers each kind of reach takes."""


@attrs.frozen
class ReachSaid:
    """A reach as code. ``code`` makes it from the classes ``imports``; ``reads`` is the body of a test's function."""

    code: str
    imports: tuple[str, ...]
    reads: str
    is_state: bool = False
    is_custom: bool = False

    @property
    def buffers(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """The buffers that are stored by default."""
        return STATE if self.is_state else KV


def read_reach(text: str) -> ReachSaid:
    """Translate the text of ``--reach``."""
    parts = [_part(part) for part in text.split("+")]
    kinds = [kind for kind, _ in parts]
    if len(parts) > 1 and set(kinds) & {"point", "custom"}:
        raise InputError(f"--reach {text}: a state, or a reach of one's own, stands alone")
    if kinds == ["point"]:
        return ReachSaid("Point()", ("Point",), "", is_state=True)
    if kinds == ["custom"]:
        return ReachSaid("{title}Reach()", ("Reach",), "range(max(0, q - 7), q)", is_custom=True)
    code = " | ".join(f"{kind.title()}({', '.join(map(str, numbers))})" for kind, numbers in parts)
    reads = [_reads(kind, numbers) for kind, numbers in parts]
    joined = reads[0] if len(reads) == 1 else "{" + ", ".join(f"*{one}" for one in reads) + "}"
    return ReachSaid(code, tuple(sorted({kind.title() for kind in kinds})), joined)


def _part(text: str) -> tuple[str, tuple[int, ...]]:
    kind, *numbers = text.strip().split(":")
    if kind not in SHAPES or len(numbers) != SHAPES[kind] or not all(n.isdigit() and int(n) for n in numbers):
        raise InputError(
            f"--reach {text}: it takes path, window:N, sinks:N, chunk:N, tail:N:K (whole numbers from 1 on), joined "
            f"by '+', or point, or custom"
        )
    return kind, tuple(map(int, numbers))


def _reads(kind: str, numbers: tuple[int, ...]) -> str:
    """Return code for the positions that the token at q reads."""
    if kind == "path":
        return "range(q)"
    if kind == "window":
        return f"range(max(0, q - {numbers[0] - 1}), q)"
    if kind == "sinks":
        return f"range(min({numbers[0]}, q))"
    if kind == "chunk":
        return f"range(q // {numbers[0]} * {numbers[0]}, q)"
    return f"range(max(q // {numbers[0]} * {numbers[0]}, q - {numbers[1]}), q)"
