"""The session adapter of transformers' models: the entry point by which ``cache.session(model, ids)`` finds ``hf``.

This module stands outside of ``hf`` because it must import where transformers is not installed. It imports ``hf`` only
when the model looks like one of transformers'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixloom import Cache, InputError, hookimpl

if TYPE_CHECKING:
    from .hf import Session

prefixloom_api = 1  # the version of the plugin contract: clause O3 of docs/hooks.md
OPTIONS = ("namespace", "label", "chunk")


@hookimpl
def prefixloom_session(cache: Cache, model: Any, ids: Any, options: dict[str, Any]) -> Session | None:
    if not _looks_like_transformers(model):
        return None
    from .hf import session

    wrong = sorted(options.keys() - {*OPTIONS})
    if wrong:
        raise InputError(f"a session of a transformers model takes {', '.join(OPTIONS)}, got {', '.join(wrong)}")
    return session(cache, model, ids, **options)


def _looks_like_transformers(model: Any) -> bool:
    """Return whether an object looks like a generating model of transformers; ``hf`` checks it with transformers."""
    config = getattr(model, "config", None)
    if callable(getattr(config, "get_text_config", None)) and hasattr(model, "generate"):
        return True
    return any(
        f"{kind.__module__}.{kind.__name__}" == "prefixloom_engine.hf.model.HFModel" for kind in type(model).__mro__
    )
