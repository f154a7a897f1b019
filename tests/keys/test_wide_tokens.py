"""Tokens of eight bytes are a change of one constant: nobody but the room ``keys`` knows how many bytes a token has."""

from __future__ import annotations

import subprocess
import sys

from tests.support.places import ROOT

WIDE = """
import importlib.abc, importlib.util, sys

class Wide(importlib.abc.InspectLoader):
    def get_source(self, name):
        with open("core/prefixloom/keys/tokens.py") as file:
            source = file.read()
        assert source.count("TOKEN_BYTES = 4\\n") == 1
        return source.replace("TOKEN_BYTES = 4\\n", "TOKEN_BYTES = 8\\n")

class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, Wide()) if name == "prefixloom.keys.tokens" else None

sys.meta_path.insert(0, Finder())
from prefixloom.testing.oracle.writer import SetsWriter

def prompt(writer, plain=SetsWriter.prompt):
    return tuple(token << 32 for token in plain(writer))

SetsWriter.prompt = prompt
"""
"""Makes this process one with wide tokens, of which those of prompts differ behind their first four bytes."""
MODEL = """
from prefixloom import encode
from tests.random.property import run

assert encode([1 << 40]).tolist() == [1 << 40]
counts = {}
for name in ("path", "path and window, lookahead 2", "path, window and point", "everything"):
    for what, times in run(name, "wide", 150).items():
        counts[what] = counts.get(what, 0) + times
assert counts["hit"] > 5, counts

from tests.random.events import run

counts = run("path and window, lookahead 2", "wide", 150) + run("path", "wide", 150)
assert counts["hit"] > 0, counts
"""


FILES = ["tests/keys/test_identity.py", "tests/lab/test_recording.py", "tests/tiers/test_store.py"]


def test_model_events_recordings_and_stores_work_when_tokens_have_eight_bytes() -> None:
    """In a process of its own, for which all is imported once."""
    options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not slow"]
    script = WIDE + MODEL + f"import pytest\nsys.exit(pytest.main({[*options, *FILES]}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
