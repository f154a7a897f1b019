"""A part of the clients under pressure; more of them are ``python -m tests.random.serving``."""

from __future__ import annotations

import logging

import pytest

from tests.random.serving import Clients
from tests.support.sampling import slow

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


@pytest.mark.parametrize("requests", [250, slow(2000)])
def test_whatever_clients_and_faults_do_answers_stay_right_and_nothing_is_left(
    requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    clients = Clients(2, requests)
    assert clients.run() == []
    counts = clients.counts
    assert counts["checked"] > requests // 3
    assert min(counts["vanished"], counts["status 400"], counts["restarts after failed passes"]) > requests // 50
