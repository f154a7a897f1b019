"""Sends the traffic to an engine and writes down what came back. Used by the children that hold an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.engines.traffic import Traffic, Turn


@attrs.frozen
class Answer:
    """What an engine answered to one request."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    """By how much each token's log-probability is above that of the next best."""
    cached: int
    """How many tokens of the prompt the engine says it did not compute."""


Generate = Callable[[Sequence[Turn]], list[Answer]]


def drive(told: dict[str, Any], generate: Generate) -> dict[str, Any]:
    """Send all waves. After each, a line goes to the progress file, so that who watches may kill this process."""
    traffic = Traffic(**told["traffic"])
    progress = Path(told["progress"])
    answers = []
    begun = time.monotonic()
    for turns in traffic.waves():
        got = generate(turns)
        for turn, answer in zip(turns, got, strict=True):
            Traffic.answered(turn, answer.tokens)
            about = {"name": turn.name, "wave": turn.wave, "world": turn.conversation.world}
            answers.append({**about, "prompt": list(turn.prompt), **attrs.asdict(answer)})
        with progress.open("a") as file:
            file.write(f"{len(answers)}\n")
    return {"answers": answers, "seconds": time.monotonic() - begun}


def margin(logprobs: Sequence[float]) -> float:
    """Return the distance of the two largest."""
    first, second, *_ = sorted(logprobs, reverse=True)
    return first - second


def finish(told: dict[str, Any], result: dict[str, Any]) -> None:
    Path(told["result"]).write_text(json.dumps(result))
