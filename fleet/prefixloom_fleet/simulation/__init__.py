"""Simulation: a trace through R replicas, each a real cache without bytes, in one virtual time.

A replica is the lab's driver of a composed cache, advanced event by event. What a router knows of it comes from the
journal of its cache, as late as one says. This room knows no process and no network.

Read ``fleet_simulation`` first: the one time in which everything happens. Around it:

``replica``        one replica: the lab's driver, with a store behind its cache
``prefix_index``   what routers know of the caches: whose pages, and where each can resume
``member``         one replica while it is there, and what a router's policy sees of it
``shared_store``   what replicas have written for all, and what it costs to read it
``outages``        replicas that die and join again
``repeated``       a trace several times over, or faster
``fleet_outcome``  what was measured, and its tables
``fleet_report``   the same as a page
"""

from .fleet_outcome import FleetOutcome, ReplicaFigures
from .fleet_simulation import FleetSetup, simulate, simulate_all
from .outages import Outage
from .repeated import RepeatedTrace
from .shared_store import StoreSpeed

__all__ = [
    "FleetOutcome",
    "FleetSetup",
    "Outage",
    "RepeatedTrace",
    "ReplicaFigures",
    "StoreSpeed",
    "simulate",
    "simulate_all",
]
