"""What others may import is written down, and changes only where CHANGELOG.md says so."""

from __future__ import annotations

import pytest

from tests.support.api_names import CHANGELOG, LISTED, digest, names, replayed, told


def test_the_public_names_and_signatures_are_those_that_are_written_down() -> None:
    listed = LISTED.read_text().splitlines()
    now = told().splitlines()
    gone, new = sorted(set(listed) - set(now)), sorted(set(now) - set(listed))
    assert (gone, new) == ([], []), (
        "say it in CHANGELOG.md under '### Public names' (Added, Removed, Changed), "
        "then: python -m tests.support.api_names"
    )
    assert listed == now


def test_the_changelog_comes_to_the_names_that_there_are() -> None:
    known, newest, wrong = replayed(CHANGELOG.read_text())
    assert wrong == []
    assert sorted(known) == sorted(names())
    assert newest == digest(LISTED.read_text()), "a signature changed: say which under '### Public names'"


LOG = """## 0.2.0
### Public names
- Added to `prefixloom`: `b`
- Removed from `prefixloom`: `a`
- Changed of `prefixloom`: `c`
- Signatures: `beef`
## 0.1.0
### Public names
- Added to `prefixloom`: `a`, `c`
- Added hooks: `h`
- Signatures: `dead`
"""


def test_a_changelog_is_replayed_from_its_oldest_release() -> None:
    assert replayed(LOG) == ({"prefixloom.b", "prefixloom.c", "hook h"}, "beef", [])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("Added to `prefixloom`: `c`", "Added prefixloom.c"),
        ("Removed from `prefixloom`: `z`", "Removed prefixloom.z"),
        ("Changed of `prefixloom`: `z`", "Changed prefixloom.z"),
    ],
)
def test_a_changelog_that_contradicts_itself_is_seen(line: str, wrong: str) -> None:
    assert replayed(LOG.replace("Added to `prefixloom`: `b`", line))[2] == [wrong]
