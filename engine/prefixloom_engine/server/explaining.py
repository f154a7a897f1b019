"""``prefixloom explain``: why a running server would hit what it hits of a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from prefixloom import InputError

from .client import ServerRefused, add_server_arguments, ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="a text; @FILE: the text in a file; -: standard input")
    parser.add_argument("--chat", action="store_true", help="the text is one message of a user, in the chat template")
    parser.add_argument("--salt", default="", metavar="SALT", help="the request's cache_salt")
    parser.add_argument("--namespace", metavar="NAME", help="look there, with an administrator's key")
    parser.add_argument("--json", action="store_true", help="as data")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation. Return 1 if the server refuses."""
    text = _text(args.prompt)
    body = {"cache_salt": args.salt, "namespace": args.namespace}
    body |= {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
    try:
        told = ask(args, "POST", "/cache/explain", {name: value for name, value in body.items() if value is not None})
    except ServerRefused as error:
        print(f"prefixloom: {error}", file=sys.stderr)
        return 1
    print(json.dumps(told, indent=2) if args.json else "\n".join(told["sentences"]))
    return 0


def _text(given: str) -> str:
    try:
        if given == "-":
            return sys.stdin.read()
        return Path(given[1:]).read_text(encoding="utf-8") if given.startswith("@") else given
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the prompt cannot be read: {error}") from error
