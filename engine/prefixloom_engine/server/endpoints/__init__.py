"""Endpoints: what clients ask at one path, and the objects in which they are answered.

Each module has the body of its endpoint and its ``Form``. An endpoint knows the shape of one API, and nothing of the
engine. Read ``completions`` first, the simplest one. A new endpoint is a module here and its name in ``FORMS``.
"""

from __future__ import annotations

from .chats import ChatForm
from .completions import CompletionForm
from .form import Form

FORMS: tuple[type[Form], ...] = (ChatForm, CompletionForm)
"""The endpoints at which a model answers."""
