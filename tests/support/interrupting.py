"""Children that a test interrupts, and that never outlive it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(call: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child that SIGINT ends, with pipes; killed if the test did not see it end.

    A background job of a shell that is not interactive ignores SIGINT, and children inherit that. What has a handler
    they have as the default; so no code need run between fork and exec, where threads would make it unsafe.
    """
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, inherited)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
