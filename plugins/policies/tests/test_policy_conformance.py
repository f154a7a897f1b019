"""The conformance kit on every policy of the distribution, as it is installed."""

import pytest

from prefixloom.testing import AdmissionCase, PolicyCase, parametrize_with_laws

POLICIES = [PolicyCase.installed("adaptive")]
ADMISSIONS = [AdmissionCase.installed(name) for name in ("ends", "prompts", "branches", "spaced", "by-cost")]


@parametrize_with_laws(*POLICIES)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@parametrize_with_laws(*ADMISSIONS)
def test_conformance_of_admissions(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_each_policy_has_its_entry_points_name(case: PolicyCase) -> None:
    assert f"policy:{case.policy().name}" == case.label
