"""Addresses: which transport an address means, and who may be at its other end."""

from __future__ import annotations

import importlib.util
import os
import re

from prefixloom import InputError
from prefixloom.connections import Side, SideKeys, is_local, read_keys
from prefixloom.storage import shown_url

from .transport import Transport

KeyFile = str | os.PathLike[str] | None
MOST_PORT = (1 << 16) - 1
ADDRESS = re.compile(r"tcp://(\[[^\]]+\]|[^:/]+):(\d+|\*)|ipc://.+")


def open_transport(over: str | Transport, side: Side, key_file: KeyFile) -> Transport:
    """Return the transport itself, or open one at an address: of a prefill process bound, of a decode one connected."""
    if not isinstance(over, str):
        if key_file is not None:
            raise InputError("keys are for an address: a transport that is given has its own")
        return over
    keys = check_address(over, side, key_file)
    if importlib.util.find_spec("zmq") is None:
        raise InputError("two processes need pyzmq: pip install 'prefixloom[transport]'")
    from .zmq_transport import DecodeSocket, PrefillSocket

    return PrefillSocket(over, keys) if side == "server" else DecodeSocket(over, keys)


def check_address(address: str, side: Side, key_file: KeyFile) -> SideKeys | None:
    """Read the keys for an address. Without keys it must lie on this machine."""
    found = ADDRESS.fullmatch(address)
    if found is None:
        raise InputError(f"an address is tcp://HOST:PORT or ipc://PATH, got {shown_url(address)!r}")
    if found[2] is not None and found[2] != "*" and int(found[2]) > MOST_PORT:
        raise InputError(f"{shown_url(address)} has a port above {MOST_PORT}")
    if key_file is not None:
        return read_keys(key_file, side)
    if not is_local(address):
        raise InputError(
            f"{shown_url(address)} can be reached from other machines, and without keys anybody there may read "
            f"prompts and hand over content: give keys=, a file that prefixloom.connections.write_keys makes, or use "
            f"127.0.0.1"
        )
    return None
