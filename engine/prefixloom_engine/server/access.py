"""Access: the keys that clients show, and whose namespaces they open.

Nothing is shared between two namespaces. Without keys there is one tenant, and whoever reaches the server is served.
"""

from __future__ import annotations

import hmac
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from prefixloom import InputError

from .protocol import ApiError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
FIELDS = {"key", "namespace", "admin"}
LEAST_KEY = 16


@attrs.frozen
class Tenant:
    """Who asks. ``namespace``: where what this tenant's requests leave is cached. ``admin``: may administer."""

    name: str = ""
    namespace: str = ""
    admin: bool = False

    def namespace_of(self, salt: str) -> str:
        """The namespace of a request with this ``cache_salt``. No name has a slash, so it is nobody else's."""
        return f"{self.namespace}/{salt}" if salt else self.namespace


@attrs.frozen
class Access:
    """``keys``: tenant by key; empty: nobody needs a key, and nobody administers."""

    keys: Mapping[str, Tenant] = attrs.field(factory=dict, repr=False)

    def tenant(self, authorization: str | None) -> Tenant:
        """Who shows this header. ``ApiError``: nobody that is known."""
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


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """The tables of a file. ``where``: what an ``InputError`` calls it."""
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tables: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{where} is no TOML: {error}") from error
    return tables


def read_tenants(path: Path) -> Access:
    """Read a file of keys: a table for each tenant, with its ``key``, and perhaps ``namespace`` and ``admin``."""
    where = f"the file of keys {str(path)!r}"
    found: dict[str, Tenant] = {}
    for name, table in read_toml(path, where).items():
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
    return Tenant(name, namespace, admin), key
