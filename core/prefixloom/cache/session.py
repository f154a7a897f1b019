"""Sessions: one conversation that a model's own code runs over a cache.

The core knows no model. An installed adapter that knows one says so (``prefixloom_session``), and makes the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from ..errors import CompositionError, PrefixloomError

if TYPE_CHECKING:
    from .cache import Cache


@attrs.frozen
class SessionPlugin:
    """A distribution's adapter of models."""

    name: str
    source: str
    manager: pluggy.PluginManager = attrs.field(eq=False, repr=False)

    def open(
        self, cache: Cache, model: object, ids: object, options: Mapping[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """The session of this model, or None if the adapter does not know it."""
        try:
            answer = self.manager.hook.prefixloom_session(cache=cache, model=model, ids=ids, options=dict(options))
        except PrefixloomError:
            raise
        except Exception as error:
            raise CompositionError(
                f"session adapter {self.name!r} ({self.source}) raised {error!r} for {_told(model)}: report it there"
            ) from error
        if answer is not None and not isinstance(answer, AbstractContextManager):
            raise CompositionError(
                f"session adapter {self.name!r} ({self.source}) answered {answer!r}: prefixloom_session must return a "
                f"context manager, or None for a model that it does not know"
            )
        return answer


def open_session(cache: Cache, model: object, ids: object, options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Of the first adapter that knows the model, by the order of their names."""
    plugins = cache.composition.registry.session_plugins()
    for plugin in plugins:
        session = plugin.open(cache, model, ids, options)
        if session is not None:
            return session
    asked = ", ".join(f"{plugin.name} ({plugin.source})" for plugin in plugins) or "none"
    raise CompositionError(
        f"no installed adapter knows {_told(model)}, so no session can be made of it. Installed: {asked}. Install the "
        f"package that offers one for it (an entry point session:NAME in the group 'prefixloom'), or write one: "
        f"prefixloom_session in docs/hooks.md"
    )


def _told(model: object) -> str:
    kind = type(model)
    return f"a model of {kind.__module__}.{kind.__qualname__}"
