"""URLs of stores: the options behind the ``?``, and a URL as it may be shown. It knows no store."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import CompositionError, StorageError

UrlOption = Callable[[str], Any]
"""Reads the text of an option; it raises a ``ValueError`` or ``CompositionError`` that says what is wrong."""
SECRET = re.compile("key|secret|pass|pwd|token|auth|bearer|sas|sign|cred|connection_string", re.IGNORECASE)
PASSWORD = re.compile(r"(?<=://)([^\s/?#@:]*):[^\s/]*@")
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


def options_of(url: str, known: Mapping[str, UrlOption]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the URL before the ``?``, the options of a store behind it, and all other options there."""
    unreadable = StorageError(
        f"{shown_url(url)} is no URL: its host or port cannot be read. In a password, / is written %2F, ? %3F, # %23, "
        f"@ %40, [ %5B"
    )
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  it raises if it is no number
    except ValueError:
        raise unreadable from None  # the error says what stands there, which may be a password
    if "@" in parts.query.partition("=")[0]:
        raise unreadable
    if parts.fragment:
        raise StorageError(f"{shown_url(url)}: write # as %23")
    options: dict[str, Any] = {}
    others: dict[str, str] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            others[name] = text
            continue
        try:
            options[name] = known[name](text)
        except (CompositionError, ValueError) as error:
            raise StorageError(
                f"{shown_url(url)}: {name}={shown_value(name, text)!r}: {without_passwords(str(error))}"
            ) from error
    return url.partition("?")[0], options, others


def seconds(text: str) -> float:
    """Return the seconds of a text such as "90", "90s", "15m", "12h" or "7d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|[smhd]?)\s*", text)
    if match is None:
        raise ValueError('this is no time: write seconds, or a text such as "15m" or "7d"')
    return float(match[1]) * UNITS[match[2] or "s"]


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", "no", "yes"):
        raise ValueError("write 1 or 0")
    return text.lower() in ("1", "true", "yes")


def shown_url(url: str) -> str:
    """Return a URL as it may be shown: without passwords and values of options that may be secrets."""
    at = max(url.partition(mark)[0].rfind("@") for mark in "?=")  # a later one is of an option; ? may be of a password
    scheme, slashes, login = url[: max(at, 0)].partition("//")
    user, colon, _ = login.partition(":")
    rest, mark, query = url[max(at, 0) :].partition("?")
    rest = f"{scheme}{slashes}{user}{':***' if colon else ''}{rest}"
    options = [each.partition("=") for each in query.split("&")]
    shown = "&".join(f"{name}{sign}{shown_value(name, text)}" for name, sign, text in options)
    return without_passwords(rest + mark + shown)


def shown_value(name: str, text: str) -> str:
    """Return an option of a URL as it may be shown. It may be a URL that has a password."""
    plain = unquote(text)
    return "***" if SECRET.search(name) else text if PASSWORD.search(plain) is None else without_passwords(plain)


def without_passwords(text: str) -> str:
    """Return a text, such as an error, without the passwords of the URLs in it."""
    return PASSWORD.sub(r"\1:***@", text)
