"""Client: how the commands ask a running server. ``prefixloom cache``, ``explain`` and ``top`` use it."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prefixloom import InputError, PrefixloomError
from prefixloom.storage import shown_url

KEY_VARIABLE = "PREFIXLOOM_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"


class ServerRefused(PrefixloomError):
    """The server answers with an error."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}")
    parser.add_argument("--key-file", metavar="FILE", help=f"has the key alone (default: ${KEY_VARIABLE})")


def ask(args: argparse.Namespace, method: str, path: str, body: Any = None, *, seconds: float = 60.0) -> Any:
    """Ask the server that the arguments name, with the key if there is one, and return its answer.

    ``ServerRefused``: it answers with an error. ``InputError``: it does not answer.
    """
    server = args.server
    if server.partition("://")[0].lower() not in ("http", "https"):
        raise InputError(f"--server {shown_url(server)!r} is no address: write {DEFAULT_URL}")
    headers = {"content-type": "application/json"}
    if key := key_of(args.key_file):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(server.rstrip("/") + path, data=data, headers=headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ServerRefused(_said(error)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(f"{shown_url(server)} does not answer: {getattr(error, 'reason', error)}") from error


def key_of(path: str | None) -> str:
    """Return the key in a file, or in the environment; empty if there is none."""
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--key-file {path} cannot be read: {error}") from error


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)
