"""Access: the keys that clients show, whose namespaces they open, and the names by which clients call the server.

Nothing is shared between two namespaces. Without keys there is one tenant, and whoever reaches the server is served.
"""

from __future__ import annotations

import hmac
import importlib
import ipaddress
import math
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from prefixloom import InputError
from prefixloom.connections import read_secret

from .protocol import ApiError

OTHERS = stat.S_IWGRP | stat.S_IRWXO
"""What a file of keys lets nobody do: a group may read it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
FIELDS = {"key", "namespace", "admin", "share", "priority"}
LEAST_KEY = 16
MOST_SHOWN = 100
"""Characters of a header that an error repeats."""


@attrs.frozen
class Tenant:
    """Who asks. ``namespace``: where what this tenant's requests leave is cached. ``admin``: may administer. ``share``:
    its part of all that tenants share, where others want it too. ``priority``: a higher one counts as this.
    """

    name: str = ""
    namespace: str = ""
    admin: bool = False
    share: float = 1.0
    priority: int | None = None

    def namespace_of(self, salt: str) -> str:
        """Return the namespace of a request with this ``cache_salt``. No name has a slash, so it is nobody else's."""
        return f"{self.namespace}/{salt}" if salt else self.namespace


@attrs.frozen
class Access:
    """``keys``: tenant by key; empty: nobody needs a key, and nobody administers."""

    keys: Mapping[str, Tenant] = attrs.field(factory=dict, repr=False)

    @property
    def shares(self) -> dict[str, float]:
        """By name, the share of each tenant."""
        return {tenant.name: tenant.share for tenant in self.keys.values()}

    @property
    def cache_shares(self) -> dict[str, float] | None:
        """By namespace, the shares of its tenants together; None where there is one tenant."""
        found: dict[str, float] = {}
        for tenant in self.keys.values():
            found[tenant.namespace] = found.get(tenant.namespace, 0.0) + tenant.share
        return found or None

    def tenant(self, authorization: str | None) -> Tenant:
        """Return the tenant that shows this header. ``ApiError``: no tenant has its key."""
        if not self.keys:
            return Tenant()
        scheme, _, shown = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not shown:
            raise ApiError(401, "this server wants a key: Authorization: Bearer KEY", code="missing_api_key")
        found = None
        for key, tenant in self.keys.items():  # all are compared, so that the time tells nothing
            if hmac.compare_digest(key.encode(), shown.strip().encode("utf-8", "surrogateescape")):
                found = tenant
        if found is None:
            raise ApiError(401, "this key is not known here", code="invalid_api_key")
        return found

    def admin(self, authorization: str | None) -> Tenant:
        if not self.keys:
            raise ApiError(
                403, "administering wants a key: start the server with --keys FILE, where one has admin = true"
            )
        tenant = self.tenant(authorization)
        if not tenant.admin:
            raise ApiError(403, f"the key of {tenant.name!r} may not administer")
        return tenant


@attrs.frozen
class Hosts:
    """The names by which clients may call the server. A web page reaches what the browser of its reader reaches.

    Other names are refused, because a page may let its own name point here (DNS rebinding). Requests of other origins
    are refused, because a page may send them although it cannot read the answer.

    ``bound``  where the server listens
    ``more``   further names of it; "*": any name
    """

    bound: str = "127.0.0.1"
    more: frozenset[str] = frozenset()

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise ``ApiError`` if the server is called by another name, or a page of another site asks."""
        host, origin = headers.get("host"), headers.get("origin")  # a client of HTTP/1.0 says no host
        if host is not None and not self.knows(hostname(f"//{host}")):
            raise ApiError(
                403, f"this server is not known as {host[:MOST_SHOWN]!r}: start it with --allow-host NAME",
                code="unknown_host",
            )  # fmt: skip
        foreign = origin is not None and origin.partition("//")[2] != host and hostname(origin) not in self.more
        asks = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")  # an image, a script, a frame
        if foreign or (asks and origin is None and headers.get("sec-fetch-dest") != "document"):
            raise ApiError(403, "this server takes no requests of other sites' pages", code="foreign_origin")

    def knows(self, name: str) -> bool:
        """Return whether the server is called so. Where it listens at all addresses, any of them is a name of it."""
        if name in (self.bound.lower(), *self.more) or "*" in self.more:
            return True
        number, bound = ip_of(name), ip_of(self.bound)
        if bound is None or bound.is_unspecified:
            return number is not None
        return number == bound or (bound.is_loopback and number is not None and number.is_loopback)


def hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the number of a host that is one; a name that always means this machine has that of it."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None


def read_toml(path: Path, where: str, closed: int = 0) -> dict[str, Any]:
    """Read the tables of a file. ``where``: how errors call it. ``closed``: bits that its mode must not have."""
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tables: dict[str, Any] = toml.loads(read_secret(path, closed).decode("utf-8"))
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{where} is no TOML: {error}") from error
    return tables


def read_tenants(path: Path) -> Access:
    """Read a file of keys: a table for each tenant, with its ``key``, and perhaps other fields of a ``Tenant``."""
    where = f"the file of keys {str(path)!r}"
    found: dict[str, Tenant] = {}
    for name, table in read_toml(path, where, OTHERS).items():
        tenant, key = _tenant(where, name, table)
        if key in found:
            raise InputError(f"{where} gives {name!r} and {found[key].name!r} the same key")
        found[key] = tenant
    if not found:
        raise InputError(f'{where} has no tenant: write a table such as [alice], with key = "..."')
    return Access(found)


def _tenant(where: str, name: str, table: Any) -> tuple[Tenant, str]:
    if not isinstance(table, dict) or not NAME.fullmatch(name):
        raise InputError(f"{where} has {name!r}: each tenant is a table whose name has letters, digits, _ . and -")
    unknown = sorted(table.keys() - FIELDS)
    if unknown:
        raise InputError(f"{where} gives {name!r} {unknown[0]!r}; a tenant has {', '.join(sorted(FIELDS))}")
    key, namespace, admin = table.get("key"), table.get("namespace", name), table.get("admin", False)
    if not isinstance(key, str) or len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"{where} gives {name!r} a key that is none: at least {LEAST_KEY} printable characters")
    if not isinstance(namespace, str) or not NAME.fullmatch(namespace):
        raise InputError(f"{where} gives {name!r} a namespace that is none: letters, digits, _ . and -")
    if not isinstance(admin, bool):
        raise InputError(f"{where} gives {name!r} admin = {admin!r}: it is true or false")
    share, priority = table.get("share", 1), table.get("priority")
    if share.__class__ not in (int, float) or not 0 < share < math.inf:
        raise InputError(f"{where} gives {name!r} share = {share!r}: it is a number above 0")
    if priority is not None and priority.__class__ is not int:
        raise InputError(f"{where} gives {name!r} priority = {priority!r}: it is a whole number")
    return Tenant(name, namespace, admin, float(share), priority), key
