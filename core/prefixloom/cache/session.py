"""Session: one conversation that a model's own code runs over a cache.

The core knows no model. An installed adapter that knows the model makes the session (``prefixloom_session``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs
import pluggy

from ..errors import CompositionError, PrefixloomError


@attrs.frozen
class SessionPlugin:
    """An adapter of models that a distribution offers."""

    name: str
    source: str
    manager: pluggy.PluginManager = attrs.field(eq=False, repr=False)

    def open(
        self, cache: object, model: object, ids: object, options: Mapping[str, object]
    ) -> AbstractContextManager[Any] | None:
        """Make a session of this model, or return None if the adapter does not know the model."""
        try:
            answer = self.manager.hook.prefixloom_session(cache=cache, model=model, ids=ids, options=dict(options))
        except PrefixloomError:
            raise
        except Exception as error:
            raise CompositionError(
                f"session adapter {self.name!r} ({self.source}) raised {error!r} for {_named(model)}: report it there"
            ) from error
        if answer is not None and not isinstance(answer, AbstractContextManager):
            raise CompositionError(
                f"session adapter {self.name!r} ({self.source}) answered {answer!r}: prefixloom_session must return a "
                f"context manager, or None for a model that it does not know"
            )
        return answer


def open_session(
    plugins: Iterable[SessionPlugin], cache: object, model: object, ids: object, options: Mapping[str, object]
) -> AbstractContextManager[Any]:
    """Make a session with the first adapter that knows the model."""
    plugins = tuple(plugins)
    for plugin in plugins:
        session = plugin.open(cache, model, ids, options)
        if session is not None:
            return session
    asked = ", ".join(f"{plugin.name} ({plugin.source})" for plugin in plugins) or "none"
    raise CompositionError(
        f"no installed adapter knows {_named(model)}, so no session can be made of it. Installed: {asked}. Install the "
        f"package that offers one for it (an entry point session:NAME in the group 'prefixloom'), or write one: "
        f"prefixloom_session in docs/hooks.md"
    )


def _named(model: object) -> str:
    kind = type(model)
    return f"a model of {kind.__module__}.{kind.__qualname__}"
