"""Which of its states a finished request hands over, over a pool that names places as SGLang's does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixloom_sglang.composition import STATE
from prefixloom_sglang.states import StateSlots

STEP = 8
BUFFER = (31, 32)
"""The slots in the two places of a request's buffer."""


class Pool:
    """SGLang's hybrid request pool, as far as the end of a request asks it."""

    mamba_allocator = None
    device = "cpu"

    def __init__(self, places: int = 2) -> None:
        self.mamba_ping_pong_track_buffer_size = places
        self.kept: int | None = None

    def get_mamba_ping_pong_keep_idx(self, req: Any) -> int:
        place: int = req.kv.mamba_last_track_idx
        return place

    def get_mamba_ping_pong_other_idx(self, place: int) -> int:
        return 1 - place if self.mamba_ping_pong_track_buffer_size == 2 else place

    def free_mamba_cache(self, req: Any, mamba_ping_pong_track_buffer_to_keep: int) -> None:
        self.kept = mamba_ping_pong_track_buffer_to_keep


def request(*, newest: int | None, older: int | None, last: int, following: int, begun: int, passes: int = 5) -> Any:
    """``last``: the place of the newest state; ``following``: the next one; ``passes``: begun after the prompt."""
    kv = SimpleNamespace(
        mamba_last_track_seqlen=newest, mamba_prev_track_seqlen=older, mamba_last_track_idx=last,
        mamba_next_track_idx=following, kv_committed_len=begun, mamba_ping_pong_track_buffer=torch.tensor(BUFFER),
    )  # fmt: skip
    return SimpleNamespace(kv=kv, decode_batch_idx=passes)


def states(pool: Pool, lazy: bool = False) -> StateSlots:
    move: Callable[..., Any] = lambda tensor, _: tensor  # noqa: E731
    return StateSlots(pool, move, lambda _: None, True, lazy, STEP)


def handed(found: StateSlots, req: Any, up_to: int) -> tuple[int, int]:
    """The length of the state that is handed over, and its slot."""
    return found.length(req, up_to, True), int(found.hand_in(req, up_to, True)[STATE][0])  # type: ignore[index]


def test_no_pass_at_a_boundary_runs_so_the_newest_state_is_handed_over() -> None:
    for last in (0, 1):
        for following in (0, 1):
            req = request(newest=8, older=None, last=last, following=following, begun=13)
            assert handed(states(Pool()), req, 13) == (8, BUFFER[last])


def test_a_pass_that_writes_beside_the_newest_state_does_not_harm_it() -> None:
    turned = request(newest=8, older=None, last=0, following=0, begun=16)
    assert handed(states(Pool()), turned, 16) == (8, BUFFER[0])
    first_pass = request(newest=4, older=None, last=0, following=1, begun=8, passes=1)
    assert handed(states(Pool()), first_pass, 8) == (4, BUFFER[0])


def test_a_state_that_a_running_pass_overwrites_is_not_handed_over() -> None:
    assert states(Pool()).length(request(newest=8, older=None, last=0, following=1, begun=16), 16, True) == 0


def test_where_the_newest_state_stands_for_too_much_the_one_before_is_handed_over() -> None:
    req = request(newest=16, older=8, last=1, following=0, begun=17)
    assert handed(states(Pool()), req, 15) == (8, BUFFER[0])
    assert states(Pool()).length(req, 7, True) == 0


def test_the_one_before_is_not_handed_over_while_a_pass_overwrites_it() -> None:
    assert states(Pool()).length(request(newest=16, older=8, last=1, following=1, begun=24), 15, True) == 0


@pytest.mark.parametrize(("places", "lazy"), [(1, False), (2, True)])
def test_a_buffer_without_a_second_place_is_written_by_no_pass_beyond_the_end(places: int, lazy: bool) -> None:
    req = request(newest=8, older=None, last=0, following=0, begun=16)
    assert handed(states(Pool(places), lazy), req, 16) == (8, BUFFER[0])
