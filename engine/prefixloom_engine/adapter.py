"""The adapter of transformers' models, which ``cache.session(model, ids)`` asks.

It is installed where transformers may not be, and imports it only when one of its models comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixloom import Cache, InputError, hookimpl

if TYPE_CHECKING:
    from .hf import Session

prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md
OPTIONS = ("namespace", "label", "chunk")


@hookimpl
def prefixloom_session(cache: Cache, model: Any, ids: Any, options: dict[str, Any]) -> Session | None:
    if not _known(model):
        return None
    from .hf import session

    wrong = sorted(options.keys() - {*OPTIONS})
    if wrong:
        raise InputError(f"a session of a transformers model takes {', '.join(OPTIONS)}, got {', '.join(wrong)}")
    return session(cache, model, ids, **options)


def _known(model: Any) -> bool:
    """Whether it looks like a model of transformers that generates; what it is inside is judged with transformers."""
    config = getattr(model, "config", None)
    if callable(getattr(config, "get_text_config", None)) and hasattr(model, "generate"):
        return True
    return any(
        f"{kind.__module__}.{kind.__name__}" == "prefixloom_engine.hf.model.HFModel" for kind in type(model).__mro__
    )
