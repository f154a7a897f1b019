"""Components whose hooks are broken late, between tiers, by the process, or in what they cost; one mistake each."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from prefixloom import AdmissionPolicy, Claim, Component, Reach, Receipt, SplitRule, Touch, Transfer, hookimpl
from prefixloom.contract.reach import Interval
from tests.support.broken_parts import W

NOTHING = AdmissionPolicy("nothing", admit=lambda state: False)
"""Takes no state, however often prompts part there."""


class ZeroesWhatWasCopied(Component):
    """Takes what lies on the host for lost on the device."""

    pool: Any = None

    @hookimpl
    def commit_hicache_transfer(self, plan: Any, phase: Any) -> None:
        if phase == "backup":
            for buffer in self.pool.buffers.values():
                buffer.zero_()


class CopiesTheWrongWay(Component):
    @hookimpl
    def build_hicache_transfers(self, plan: Any, phase: Any) -> tuple[Transfer, ...]:
        return (Transfer(self.name, 0, 4, "host", "host"),)


class ClampsLate(Component):
    """Touches content, of long prompts alone."""

    pool: Any = None

    @hookimpl
    def commit_insert(self, walk: Any) -> None:
        if walk.boundary > 2000:
            self.pool.buffers["k"].clamp_(-1e6, 1e6)


class RaisesAtTheThousandth(Component):
    """Counts its calls, and fails at one of them."""

    calls = 0

    @hookimpl
    def finalize_match_result(self, walk: Any) -> None:
        self.calls += 1
        if self.calls == 1000:
            raise ValueError("that is enough")


class WidensLate(Component):
    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: int(walk.boundary) + 4 * (walk.boundary >= 512)


class ByTheHashOfATenant(Component):
    """Some tenants' prompts are published, others' are not."""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if hash(walk.namespace) % 2 else None


class ByTheOrderOfASet(Component):
    """Notes words in the order in which a set has them."""

    words = frozenset(("some", "words", "in", "no", "order"))

    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> Receipt:
        return Receipt(data=tuple(self.words))


class ByTheProcess(Component):
    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if os.getpid() % 2 else None


def seconds(clock: Callable[[], float] = time.monotonic) -> float:
    return clock()


class ByAHelpersClock(Component):
    """The clock is found neither in the class nor in the module's names."""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if seconds() < 0 else None


class TakesExtraKeysForPairs(Component):
    """Wants to stop before the first picture."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: min([int(walk.boundary), *(start for start, _ in walk.extra)])


class SharesOfNothing(Component):
    """Divides by the length of a prompt, which may be 0."""

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim:
        return Claim(reject=walk.boundary / walk.key_tokens < 0.1)


class TrustsCopies(Component):
    @hookimpl
    def commit_hicache_transfer(self, outcome: Any) -> None:
        assert outcome.ok


class RaisesFarOut(Component):
    """Packs a position into two bytes."""

    @hookimpl
    def evict_component(self, node: Any) -> None:
        struct.pack("H", node[0].end)


class ByTheMachine(Component):
    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if len(socket.gethostname()) % 2 else None


class ByTheRank(Component):
    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if walk.start < int(os.environ.get("RANK", "0")) else None


class DropsAtEachSplit(Component):
    """Loses the state of a long prompt where another one branches off it."""

    @hookimpl
    def redistribute_on_node_split(self, parent: Any, child: Any) -> SplitRule:
        return SplitRule(keep="drop")


class KeepsLongPromptsOnly(Component):
    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if walk.boundary < 200 else None


class LosesAPage(Component):
    """Leaves the last page out a second time, as its lookahead does."""

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim:
        return Claim(reject=walk.boundary + 4 > walk.walked)


class LocksTheOtherWayRound(Component):
    """Covers all but the start, where it means the start."""

    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> Receipt:
        return Receipt(positions=((4, anchor.boundary),))


class AcceptsNothing(Component):
    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: 0


class RejectsAll(Component):
    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim:
        return Claim(reject=True)


class ReadOnce(Component):
    """What was read goes first, as if nobody came again."""

    @hookimpl
    def release_component_lock(self, receipt: Any) -> Touch:
        return Touch(positions=())


class LocksAll(Component):
    """Covers the whole prompt where a window would do."""

    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> Receipt:
        return Receipt(positions=((0, anchor.boundary),))


class Rebuilt(Reach):
    """Nothing is needed, since it is rebuilt; a running sequence keeps what is read: right."""

    early = 0

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ()

    def until(self, p: int) -> float:
        return p + W - 1 - self.early


class RebuiltAndLetGo(Rebuilt):
    early = 1


class RebuiltAndKeptLonger(Rebuilt):
    early = -1
