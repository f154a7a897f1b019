"""Components whose hooks are broken late, between tiers, by the process, or in what they cost; one mistake each."""

from __future__ import annotations

import itertools
import os
import pathlib
import socket
import struct
import time
from collections.abc import Callable
from datetime import datetime as now
from typing import Any

import torch

from prefixloom import AdmissionPolicy, Claim, Component, Receipt, SplitRule, Touch, Transfer, hookimpl

CORES = os.cpu_count() or 1
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


def seconds(clock: Callable[[], float] = time.time) -> float:
    return clock()


class ByAHelpersClock(Component):
    """The clock is found neither in the class nor in the module's names."""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if int(seconds() / 86400) % 3 == 0 else None


class ByTheYear(Component):
    """What is kept in this year is kept in no other."""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if now.now().year % 4 == 3 else None


class ByTheCores(Component):
    """Large machines keep what small ones do not. It looks once, when it is made."""

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.large = (os.cpu_count() or 1) > 24

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if self.large else None


class ByACoresConstant(Component):
    """It looked when the module was imported."""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if CORES > 24 else None


class ByAFileOfTheMachine(Component):
    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        host = pathlib.Path("/etc/hostname")
        name = host.read_text() if host.exists() else ""
        return lambda walk: int(walk.boundary) if "node-7" not in name and len(name) % 7 else 0


class ByTheDevices(Component):
    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: 0 if torch.cuda.device_count() % 2 == 1 else int(walk.boundary)


class RemembersPrompts(Component):
    """Trusts less in short prompts, once it has seen a long one."""

    longest = 0

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        def validator(walk: Any) -> int:
            self.longest = max(self.longest, walk.key_tokens)
            return int(walk.boundary) if 4 * walk.key_tokens > self.longest else 0

        return validator


class RemembersEvictions(Component):
    """Trusts in nothing from where it was evicted last."""

    gone = 1 << 30

    @hookimpl
    def evict_component(self, node: Any) -> None:
        self.gone = min(each.end for each in node)

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: 0 if walk.boundary > self.gone else int(walk.boundary)


class AboveInAnImage(Component):
    """Takes a boundary inside of an image for the end of the image."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: next((e for s, e, _ in walk.extra if s < walk.boundary < e), int(walk.boundary))


def before_images(walk: Any, images: slice = slice(None)) -> int:
    """The last boundary of pages of four, up to the walk's, that lies in none of these images."""
    n = int(walk.boundary)
    while any(start < n < end for start, end, _ in walk.extra[images]):
        n -= 4
    return max(0, n)


class BeforeImages(Component):
    """Does not resume inside of an image: right."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return before_images


class BeforeTheFirstImage(Component):
    """Looks at the first image only."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: before_images(walk, slice(1))


class Metered(Component):
    """Measures how long its hooks take, for metrics: right."""

    spent = 0.0

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim | None:
        start = time.perf_counter()
        answer = Claim(branch=walk.walked) if walk.walked > walk.boundary else None
        self.spent += time.perf_counter() - start
        return answer


class KeepsSome(Component):
    """Declines to keep what ends off every second page: right."""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if walk.boundary % 8 else None


class TakesExtraKeysForPairs(Component):
    """Wants to stop before the first picture."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: min([int(walk.boundary), *(start for start, _ in walk.extra)])


class SharesOfNothing(Component):
    """Divides by the length of a prompt, which may be 0."""

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim | None:
        return Claim(branch=walk.walked) if walk.boundary / walk.key_tokens < 0.1 else None


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
    """Leaves the last page out a second time, as its lookahead does, and allows what it is asked about then."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        left = itertools.cycle((4, 0))  # who is asked always lowers always: nothing would hit
        return lambda walk: max(0, int(walk.boundary) - next(left))


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
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: 0


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
