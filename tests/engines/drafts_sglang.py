"""Writes down what a draft model proposes in SGLang: for each request, by the number of tokens before, the tokens.

The model's answers do not depend on its drafts. So that the draft model's memory is right shows here alone. SGLang's
scheduler loads this as one of its plugins, and the environment's ``DRAFTS`` names the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    propose = EagleDraftWorker.draft
    path = Path(os.environ["DRAFTS"])

    def proposed(self: Any, batch: Any, **options: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        answer = propose(self, batch, **options)
        drafts = answer.draft_token.view(len(lengths), -1).tolist()
        with path.open("a") as file:
            for request, length, tokens in zip(batch.reqs, lengths, drafts, strict=True):
                file.write(json.dumps([request.rid, length, tokens]) + "\n")
        return answer

    EagleDraftWorker.draft = proposed


def read(path: Path) -> dict[str, dict[str, list[int]]]:
    """By request, and by the number of tokens before, what was proposed last."""
    found: dict[str, dict[str, list[int]]] = {}
    for line in path.read_text().splitlines():
        request, length, tokens = json.loads(line)
        found.setdefault(request, {})[str(length)] = tokens
    return found
