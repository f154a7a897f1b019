"""What a running sequence does with what it has committed: publishing it, and taking it back."""

from __future__ import annotations

from ...errors import ProtocolError
from .backdoor import hold, sequence_anchor, unfilled
from .sets import Piece, Running
from .steps import Steps

Pieces = dict[str, set[Piece]]


class Serving(Steps):
    """Operations on one open sequence."""

    # ------------------------------------------------------------ publishing
    def do_publish(self, number: int, pick: int) -> None:
        """``pick`` below 0: the default boundary."""
        run = self.pick(number)
        if run is None:
            return
        limit = self.model.publishable(run)
        hold(run.sequence.publishable == limit, "publishable %s, not %s", run.sequence.publishable, limit)
        legal = range(run.published, limit + 1, self.model.page)
        upto = limit if pick < 0 else legal[pick % len(legal)]
        added, optional, may_lose = self.bring(run, upto, last=False)
        waiting = set(run.pending)
        got = run.sequence.publish(None if pick < 0 else upto)
        hold(got == upto, "published %s, not %s", got, upto)
        moved = upto > run.published
        if moved:
            run.published = upto
            for name, tracks in run.tracks.items():
                run.tracks[name] = [boundary for boundary in tracks if boundary > upto]
            self.model.retain(run)
            run.pending = unfilled(run.sequence)
            run.sourced |= run.pending - waiting
        self.settle("publish", may_lose, added, optional=optional)
        if moved:
            self.settled(run, sequence_anchor(run.sequence))
            self.check_released(run)

    def bring(self, run: Running, upto: int, last: bool) -> tuple[Pieces, Pieces, dict[str, int]]:
        """The pieces that publishing must bring, those that it may, and what it may make room for."""
        if upto <= run.published and not (last and self.open_to.keeps):
            return {}, {}, {}
        added: Pieces = self.model.published_by(run, self.held(run), upto)
        optional: Pieces = {}
        room: dict[str, int] = {}
        for f in self.model.facts:
            if not f.boundary or not f.shareable:
                continue
            name = f.name
            due = self.model.checkpoint(f, run, upto)
            tracked = run.tracks[name]
            added[name] = set()
            optional[name] = {self.model.piece(f, run.ids, boundary) for boundary in tracked if boundary <= upto}
            if f.per_path is not None:
                room[name] = f.capacity + 1  # the bound per path may drop one whatever is free
            if due % self.model.page or due <= run.published:
                continue
            piece = self.model.piece(f, run.ids, due)
            if due in tracked or last:
                added[name] = {piece}
                continue
            optional[name].add(piece)
            room.setdefault(name, 1)
            if self.room({name: 1}) and (run.detached or piece not in self.model.resident[name]):
                added[name] = {piece}
        for name in self.open_to.keeps:
            f = self.facts[name]
            every = range(self.model.page, upto + 1, self.model.page) if f.boundary else ()
            optional.setdefault(name, set()).update({self.model.piece(f, run.ids, boundary) for boundary in every})
            optional[name] |= added.pop(name, set())
        return ({}, {}, room) if run.detached else (added, optional, room)

    def do_rewind(self, number: int, count: int, salt: int) -> None:
        """Take back some of what may be taken back; sometimes one token too many is tried first."""
        run = self.pick(number)
        if run is None:
            return
        floor = self.model.rewind_floor(run)
        if salt % 2 == 0:
            too_far = max(1, run.reserved - floor + 1)
            self.refused("rewind too far", ProtocolError, run.sequence.rewind, too_far)
        length = min(run.reserved, max(floor, run.reserved - count))
        run.sequence.rewind(run.reserved - length)
        if length < run.reserved:
            self.rewound(run, length, salt)
        self.settle("rewind")

    def rewound(self, run: Running, length: int, salt: int) -> None:
        """Other tokens follow from ``length`` on, and what depends on them must be computed again."""
        del run.future[length:], run.ids[length + 1 :]
        run.salt = salt
        run.reserved = length
        run.arrived = min(run.arrived, length)
        if length < run.committed:
            run.pending |= {f.name for f in self.model.facts if f.boundary}
        for name, tracks in run.tracks.items():
            run.tracks[name] = [boundary for boundary in tracks if boundary <= length]
        for f in self.model.facts:
            if not f.boundary:
                run.absent[f.name] = {i for i in run.absent.get(f.name, ()) if i * f.page < length}
        run.committed = min(run.committed, length)
        run.named = min(run.named, length)
        self.extend(run, length + self.model.lookahead)
        for f in self.model.facts:
            run.written[f.name] = min(run.written[f.name], max(0, length - f.lookahead))
            if f.lookahead:  # a draft's last entries are written again before their tokens are named
                self.write_pages(run, f, run.committed)
