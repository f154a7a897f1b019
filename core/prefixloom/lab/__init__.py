"""The lab: replays real traces through a composed cache, and tells what it would have saved and what stopped the rest.

A cache is composed on the device "meta", so its pools hold no bytes, and driven as an engine drives it. This room uses
the public verbs of a cache, and must not know what lies behind them, nor any component by name.

Read ``replay`` first: the driver. ``setup`` composes what it drives. ``requests`` and ``traces`` are what it is driven
with, ``service`` says how requests overlap in time, ``seen`` is the ideal, and ``outcome`` what was measured.
"""

from .outcome import MemorySample, PoolUse, ReplayOutcome
from .recording import RecordingCache, record
from .replay import Replay
from .requests import BlockPrompt, LabRequest, TokenPrompt
from .rerun import Recording, Rerun, Shrunk, rerun, shrink
from .seen import SeenPrefixes
from .service import Service
from .setup import Setup, replay_all
from .traces import RequestFile, read_trace

__all__ = [
    "BlockPrompt",
    "LabRequest",
    "MemorySample",
    "PoolUse",
    "Recording",
    "RecordingCache",
    "Replay",
    "ReplayOutcome",
    "RequestFile",
    "Rerun",
    "SeenPrefixes",
    "Service",
    "Setup",
    "Shrunk",
    "TokenPrompt",
    "read_trace",
    "record",
    "replay_all",
    "rerun",
    "shrink",
]
