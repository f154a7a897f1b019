"""Block hashes: a page's name, made of everything before it.

The digest of a page is that of ``prefixloom.PageChain``; that of the root is made of the cache salt and the adapter's
name. So nothing of two namespaces has the same hash, and whoever knows the tokens can compute the hashes. On the wire a
hash is the first 8 bytes of the digest, as an unsigned number.
"""

from __future__ import annotations

import hashlib
import json

import attrs

from prefixloom import PageChain


@attrs.frozen
class PageLabel:
    """What events call a namespace: the salt and the adapter of its requests; None where they have none."""

    salt: str | None = None
    lora_name: str | None = None


def root_digest(label: PageLabel, chain: PageChain) -> bytes:
    """Return the digest before the first page of a namespace."""
    return chain.root(json.dumps([label.salt, label.lora_name]))


def salt_digest(label: PageLabel) -> str | None:
    """Return the digest that events and routers say in place of a salt, which is a secret of its users."""
    if not label.salt:
        return None
    said = json.dumps([label.salt, label.lora_name]).encode()
    return hashlib.blake2b(said, digest_size=16, person=b"loom.events.root").hexdigest()


def block_hash(digest: bytes, part: int = -1) -> int:
    """Return the hash on the wire of a page, or of its ``part``-th smaller page of a component."""
    if part >= 0:
        digest = hashlib.blake2b(digest + part.to_bytes(4, "big"), digest_size=8).digest()
    return int.from_bytes(digest[:8], "big")
