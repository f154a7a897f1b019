"""``prefixloom fleet status``: the replicas of a running fleet, asked of its front."""

from __future__ import annotations

import argparse
import json
import sys

from prefixloom_engine.server.client import ServerRefused, add_server_arguments, ask

ROLES = {"prefill": "prefill, ", "decode": "decode, "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as data")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line for each replica. Return 1 if the front refuses."""
    try:
        told = ask(args, "GET", "/fleet")
    except ServerRefused as error:
        print(f"prefixloom: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(told, indent=2))
        return 0
    print(f"routing: {told['policy']}; requests: {', '.join(f'{name} {n}' for name, n in told['requests'].items())}")
    for each in told["replicas"]:
        free = ", ".join(f"{name} {share:.0%}" for name, share in each["free"].items()) or "?"
        role, process = ROLES.get(each["role"], ""), each["pid"] or "?"
        stats = each["insight"]["stats"] if each["insight"] else {}  # else its server was started without
        asked = stats.get("asked_tokens")
        hit = f"{stats['hit_tokens'] / asked:.1%} of {asked} tokens hit; " if asked else ""
        print(
            f"  {each['name']} ({role}process {process}, weights {each['fingerprint'] or '?'}): "
            f"{each['running']} requests, {each['tokens_ahead']} tokens ahead; {hit}free: {free}; "
            f"events: {each['events']}"
        )
    return 0
