"""Lookahead: how far a running sequence's content is complete, where it depends on tokens that follow.

With a lookahead of L, the entry of position p depends on the tokens up to p + L. A step may compute p before all of
these are known. So an entry is complete only once a step has written it with all of them. The layers of a step have

- the tokens that were named when the step was opened,
- those that the step computes, even if the host names them later,
- those behind the last that it computes which the layers choose themselves, if the caller says so (``ahead``).

A token that is named while a step is open counts for the steps that are opened after that.
"""

from __future__ import annotations


class Seen:
    """Which tokens layers have: ``named`` of them when their step was opened, and ``ahead`` behind the last computed.

    ``start`` is where they compute from.
    """

    __slots__ = ("ahead", "named", "start")

    def __init__(self, named: int, start: int, ahead: int) -> None:
        self.named = named
        self.start = start
        self.ahead = ahead

    def rewind(self, length: int, cut: bool) -> None:
        if cut or length <= self.start:
            self.ahead = 0
        self.named = min(self.named, length)
        self.start = min(self.start, length)


class Lookahead:
    """What is complete of one running sequence, whose content looks ``count`` tokens ahead.

    ``complete``     all entries before this are complete
    ``chosen_from``  where the last step computed from, if its layers chose the tokens behind each of its positions
                     themselves; None: they did not
    ``open``         what the layers of open steps have
    ``alone``        what the layers have that are computed outside of steps
    """

    __slots__ = ("alone", "chosen_from", "complete", "count", "open")

    chosen_from: int | None
    open: list[Seen]

    def __init__(self, count: int, boundary: int, named: int) -> None:
        self.count = count
        self.open = []
        self.resume_at(boundary, named)

    def resume_at(self, boundary: int, named: int) -> None:
        """Begin at ``boundary``, before which all entries come from the tree and are complete."""
        self.complete = boundary
        self.chosen_from = None
        self.alone = Seen(named, boundary, 0)

    def begin(self, named: int, start: int, ahead: int) -> Seen:
        """Note that a step is opened that computes from ``start`` on. Return what its layers have."""
        seen = Seen(named, start, ahead)
        self.open.append(seen)
        return seen

    def end(self, seen: Seen) -> None:
        """Note that the step is open no more. If it succeeded, ``computed`` or ``caught_up`` follows."""
        if seen in self.open:
            self.open.remove(seen)

    def computed(self, seen: Seen, upto: int, named: int) -> None:
        """Note that layers computed up to ``upto``, and wrote again the entries that waited for a token they have.

        ``named``: so many tokens are named before anything else is computed.
        """
        self.complete = max(self.complete, min(upto, max(seen.named, upto + seen.ahead) - self.count))
        if upto > seen.start:
            self.chosen_from = seen.start if seen.ahead >= self.count else None
        self.alone = Seen(named, upto, 0)

    def caught_up(self, seen: Seen) -> None:
        """Note that a draft step wrote again the entries that waited for a token named when it was opened."""
        self.complete = max(self.complete, min(seen.start, seen.named - self.count))

    def rewind(self, length: int, cut: bool) -> None:
        """Take back all from ``length`` on. ``cut``: named tokens are among it.

        An entry that was written with a token that is taken back is not complete. Where layers chose the tokens behind
        each of their positions themselves, they wrote with what they chose there, and not with a guess that is taken
        back.
        """
        for seen in (*self.open, self.alone):
            seen.rewind(length, cut)
        if cut or self.chosen_from is None or length <= self.chosen_from:
            self.complete = min(self.complete, max(0, length - self.count))
            self.chosen_from = None
        else:
            self.complete = min(self.complete, length)
