"""Teardown: how running sequences, failed work and a whole cache come to an end, with every slot given back."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many

from ..contract.policy import serving
from ..device.flight import Work
from ..device.tables import Tables
from ..tree.radix import Node, descendants
from .lease import release
from .retain import forget_surplus
from .state import Core, Hold, Running

log = logging.getLogger("prefixloom")


def give_back(core: Core, running: Running) -> None:
    """End ``running``, publish nothing, and give back all that it holds and covers."""
    if core.flight.alone:
        core.flight.end_alone(running)
    if core.shape.partial_lanes:
        forget_surplus(core, running)
    if core.index.expiries is not None:
        core.index.want(running.node, running.until)
    if running.row >= 0 and running.active:
        core.tables.leave(running)
    for lane, holding in running.pairs:
        lane.close(holding)
    if running.core is not None:
        release(core, running)
    core.live.pop(running, None)  # last: what is there a flush ends


def abandon(core: Core, hold: Hold, error: BaseException) -> None:
    """End a lease, or a running sequence with all that it holds, because of ``error``. The first error stays its own:
    what fails later may only follow from it.
    """
    hold.failed = hold.failed or error
    if hold.active:
        if isinstance(hold, Running):
            give_back(core, hold)
        else:
            release(core, hold)


def fail_work(core: Core, work: Work[Hold], followers: Many[Hold], error: BaseException) -> None:
    """End ``followers``, whose work failed, and all that read what they published since, which leaves the tree."""
    lost, doomed = core.unwritten.built_on(followers)
    log.warning(
        "%s failed with %r: %d sequences and leases end with it, and what they published since is taken back",
        work.name, error, sum(hold.active for hold in lost),
    )  # fmt: skip
    for hold in lost:
        abandon(core, hold, error)
    nodes = {node for publication in doomed for node in publication.nodes}
    # what hangs there goes with it, also if it was written long ago
    below = [each for node in nodes for each in (node, *descendants(node))]
    for node in sorted(nodes, key=lambda node: -node.end):
        for publication in doomed:
            if node in publication.nodes:
                with core.because("failed"):
                    for lane, slots in publication.slots:
                        lane.retract(node, slots)
    core.index.prune_all(below)
    core.unwritten.forget(doomed)


def end_half_way(core: Core, running: Running, run: list[Node], error: BaseException) -> None:
    """End a sequence whose publication failed: the tree took over some of its slots, and not all are covered."""
    abandon(core, running, error)
    running.held = []
    for lane in core.shape.lanes:
        lane.line_up(run)  # what the tree took over and no lease came to cover
    core.index.prune(run[-1])


def forget_everything(core: Core) -> None:
    """Free all slots of all tiers, whoever held them, and begin with an empty tree."""
    if core.watcher is not None:
        core.watcher.enter()
    shape = core.shape
    policy = shape.composition.policy
    # first: a policy of a third party may raise
    queues = [serving(policy, states=lane.unit == "boundary") for lane in shape.all_lanes]
    core.changing = "a flush that did not end"
    core.index.forget_everything()
    for running in core.live:
        core.flight.end_alone(running)
        running.core = None
    core.flight.give_up()
    core.live.clear()
    for lane, queue in zip(shape.all_lanes, queues, strict=True):
        for pool in lane.pools:
            pool.reset()
        lane.queue = queue
        lane.reset()
    core.dropped.forget()  # not earlier: the garbage collector may have dropped more meanwhile
    if core.below is not None:
        core.below.flushed()
    core.unwritten.flushed()
    core.tables = Tables(core.flight, shape.composition.device, core.tables if core.flight.works else None)
    core.keys.forget()
    core.recorder.cleared()
    if core.watcher is not None:
        core.watcher.flushed()
    core.changing = False
    if core.watcher is not None:
        core.watcher.check("flush")
