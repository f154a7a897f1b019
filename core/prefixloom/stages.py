"""Stages of a slot, which debug mode follows: the tree takes only what all of its writers have been enqueued for."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """A slot's way. A failed step takes it from Writing back to Reserved; a handed-over one is Published for good."""

    FREE = 0
    RESERVED = 1  # somebody's, without content
    WRITING = 2  # a step that is open writes it
    SEALED = 3  # all that writes it has been enqueued: the content is what its owner's tokens say
    PUBLISHED = 4  # the tree's
    RETIRED = 5  # nobody's, and a step in flight may still touch it


BEFORE: dict[Stage, tuple[Stage, ...]] = {
    Stage.RESERVED: (Stage.FREE, Stage.RETIRED, Stage.WRITING),
    Stage.WRITING: (Stage.RESERVED, Stage.WRITING, Stage.SEALED),
    Stage.SEALED: (Stage.RESERVED, Stage.WRITING, Stage.SEALED),
    Stage.PUBLISHED: (Stage.SEALED, Stage.PUBLISHED),
}
"""From which stages a slot may come to each."""
