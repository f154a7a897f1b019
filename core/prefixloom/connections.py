"""Connections: who may be at the other end of an address. It knows the keys of both sides and which addresses lie on
this machine, and opens no connection.

A file has the CURVE keys of both sides. Whoever has the file may connect. Nobody else reads anything.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, Literal

import attrs

from .errors import InputError

__all__ = ["Side", "SideKeys", "is_local", "read_keys", "read_secret", "write_keys"]

Side = Literal["server", "client"]
"""The server is the side that listens."""
LONGEST_FILE = 1 << 16
KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


@attrs.frozen
class SideKeys:
    """What one side needs: its own two keys, and the public key of the other side. Each has 40 characters (Z85)."""

    public: bytes
    secret: bytes = attrs.field(repr=False)
    other: bytes

    def authenticator(self, context: Any) -> Any:
        """Start and return what lets only the other side connect to the CURVE servers of a ZeroMQ context."""
        from zmq.auth.thread import ThreadAuthenticator

        made = ThreadAuthenticator(context)
        made.start()
        made.configure_curve_callback("*", self)
        return made

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether ZeroMQ may accept a connection with this public key."""
        return key == self.other


def write_keys(path: str | os.PathLike[str]) -> None:
    """Make new keys for both sides, and write them to a new file that only its owner may read."""
    import zmq

    made = {}
    for side in ("server", "client"):
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
    other: Side = "client" if mine == "server" else "server"
    try:
        told = json.loads(read_secret(path, 0o077, LONGEST_FILE))
        found = (told[mine]["public"], told[mine]["secret"], told[other]["public"])
        if not all(isinstance(each, str) and KEY.fullmatch(each) for each in found):
            raise ValueError("a key has 40 characters of Z85")
    except InputError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{path} has no keys for the {mine} of a connection ({error!r}): make a file with "
            f"prefixloom.connections.write_keys"
        ) from error
    public, secret, theirs = (each.encode() for each in found)
    return SideKeys(public, secret, theirs)


def read_secret(path: str | os.PathLike[str], closed: int, longest: int = -1) -> bytes:
    """Read a file of secrets. ``InputError``: its mode has a bit of ``closed``, so that others may use it."""
    with Path(path).open("rb") as file:
        if os.name == "posix" and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & closed:
            raise InputError(f"{path} has secret keys, and others may read or change it: chmod 600 {path}")
        return file.read(longest)


def is_local(address: str) -> bool:
    """Return whether this machine alone reaches an address such as ``tcp://127.0.0.1:5557``."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return scheme in ("ipc", "inproc") or (scheme == "tcp" and ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return host == "localhost"
