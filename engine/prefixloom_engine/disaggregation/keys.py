"""Keys: a file with the CURVE keys of both sides. Whoever has it may connect, and whoever has not reads nothing."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Literal

import attrs

from prefixloom import InputError

Side = Literal["prefill", "decode"]
LONGEST_FILE = 1 << 16
KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


@attrs.frozen
class SideKeys:
    """What one side needs: its own two keys, and the public key of the other side. Each has 40 characters (Z85)."""

    public: bytes
    secret: bytes = attrs.field(repr=False)
    other: bytes


def write_keys(path: str | os.PathLike[str]) -> None:
    """Make new keys for both sides, and write them to a new file that only its owner may read."""
    import zmq

    made = {}
    for side in ("prefill", "decode"):
        public, secret = zmq.curve_keypair()
        made[side] = {"public": public.decode(), "secret": secret.decode()}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise InputError(f"{path} is there already, and perhaps in use: remove it first") from error
    with os.fdopen(descriptor, "w") as file:
        json.dump(made, file, indent=1)


def read_keys(path: str | os.PathLike[str], mine: Side) -> SideKeys:
    """Read what one side needs. A file that others may read is refused."""
    other: Side = "decode" if mine == "prefill" else "prefill"
    try:
        with Path(path).open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise InputError(f"{path} has secret keys, and others may read it: chmod 600 {path}")
            told = json.loads(file.read(LONGEST_FILE))
        found = (told[mine]["public"], told[mine]["secret"], told[other]["public"])
        if not all(isinstance(each, str) and KEY.fullmatch(each) for each in found):
            raise ValueError("a key has 40 characters of Z85")
    except InputError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{path} has no keys for a {mine} process ({error!r}): make a file with "
            f"prefixloom_engine.disaggregation.write_keys"
        ) from error
    public, secret, theirs = (each.encode() for each in found)
    return SideKeys(public, secret, theirs)
