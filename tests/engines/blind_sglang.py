"""A control for SGLang: our cache does not see what keeps requests apart, nor what a draft model adds to keys.

So requests of other tenants and adapters share memory, and a draft model gets entries that belong to another token.
SGLang's scheduler loads this as one of its plugins, like ``spoil_sglang``.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    from prefixloom_sglang import cache, composition

    make = composition.books_for

    def made(*arguments: Any, **options: Any) -> Any:
        return make(*arguments, **{**options, "bigrams": False})

    composition.books_for = made
    cache.namespace_of = lambda extra_key, cache_salt: ""
