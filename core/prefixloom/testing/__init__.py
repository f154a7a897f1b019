"""What plugin authors test with: the laws of the conformance kit, a toy model that runs through a cache, and a witness.

Only this package of the core may import pytest, and its modules import torch when they are themselves imported. The
names of the kit are found here, every law by its own among them, and imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .case import ComponentCase, LawBroken, NotApplicable, Truth
    from .conformance import LAWS, Report, Verdict, check_component, check_law, report_on
    from .oracle.machine import Pit, replay
    from .oracle.stateful import state_machine
    from .policies import AdmissionCase, PolicyCase
    from .pytest_plugin import parametrize_with_laws
    from .scripts import Setting, play
    from .storage import BackendCase, check_backend, parametrize_with_checks

__all__ = [
    "LAWS",
    "AdmissionCase",
    "BackendCase",
    "ComponentCase",
    "LawBroken",
    "NotApplicable",
    "Pit",
    "PolicyCase",
    "Report",
    "Setting",
    "Truth",
    "Verdict",
    "check_backend",
    "check_component",
    "check_law",
    "parametrize_with_checks",
    "parametrize_with_laws",
    "play",
    "replay",
    "report_on",
    "state_machine",
]
HOMES = {
    "case": ("ComponentCase", "LawBroken", "NotApplicable", "Truth"),
    "conformance": ("LAWS", "Report", "Verdict", "check_component", "check_law", "report_on"),
    "oracle.machine": ("Pit", "replay"),
    "oracle.stateful": ("state_machine",),
    "pytest_plugin": ("parametrize_with_laws",),
    "policies": ("AdmissionCase", "PolicyCase"),
    "storage": ("BackendCase", "check_backend", "parametrize_with_checks"),
    "scripts": ("Setting", "play"),
}


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    if name.startswith("law_"):
        for law in importlib.import_module(f"{__name__}.conformance").LAWS:
            if law.__name__ == name:
                return law
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
