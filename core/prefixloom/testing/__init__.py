"""What plugin authors test with: the laws of the conformance kit, a toy model that runs through a cache, and a witness.

The public names are found here, and every law by its own name. Each is imported when it is asked for, because most
modules of this package import torch. Only this package of the core may import pytest.

The rooms, each of which imports only those above it:

    inside      the private fields of the core, and the bytes of pools
    toy         a small model that runs through a cache
    schedules   streams and schedules under a test's control
    kit         cases, the bench, and scripts
    oracle      a prefix cache as plain sets, compared with the real one
    laws        what must hold of components, stores and policies
    foreign     the kit held against the cache managers of other engines

The modules beside the rooms run the laws: ``conformance`` on a component, ``suites`` on anything that is installed,
``pytest_plugin`` from pytest, with ``pytest_suite`` as the file that pytest collects. Read ``conformance`` first, then
``laws``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..script import play

if TYPE_CHECKING:
    from .conformance import LAWS, Report, Verdict, check_component, check_law, report_on
    from .kit.case import ComponentCase, LawBroken, NotApplicable, Wasteful
    from .kit.scripts import Setting
    from .kit.truth import Truth
    from .laws.admission import AdmissionCase
    from .laws.policies import PolicyCase
    from .laws.storage import BackendCase
    from .oracle.writer import Pit
    from .pytest_plugin import parametrize_with_laws

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
    "Wasteful",
    "check_component",
    "check_law",
    "parametrize_with_laws",
    "play",
    "report_on",
]
HOMES = {
    "conformance": ("LAWS", "Report", "Verdict", "check_component", "check_law", "report_on"),
    "kit.case": ("ComponentCase", "LawBroken", "NotApplicable", "Wasteful"),
    "kit.scripts": ("Setting",),
    "kit.truth": ("Truth",),
    "laws.admission": ("AdmissionCase",),
    "laws.policies": ("PolicyCase",),
    "laws.storage": ("BackendCase",),
    "oracle.writer": ("Pit",),
    "pytest_plugin": ("parametrize_with_laws",),
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
