"""Conversations through a real SGLang engine on a CPU: what it answers, and how many tokens it had cached.

    python -m tests.engines.converse_sglang MODEL --cache prefixloom --page 16 --answers FILE

``--cache``: ``off``, ``own`` (SGLang's), or ``prefixloom``. Run it once for each, in the environment that
``environment`` makes, and compare the files of answers. Conversations share beginnings of one system prompt, and some
of them part from their own history.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

from tests.engines.environment import EVERYWHERE, RELEASES

WORDS = range(3, 500)


class Conversations:
    """Conversations whose next turn depends on the answers so far, the same for the same seed."""

    def __init__(self, users: int, seed: int) -> None:
        self.rng = random.Random(seed)
        system = self.rng.choices(WORDS, k=90)
        self.prompts = [
            system[: self.rng.choice((40, 64, 90))] + self.rng.choices(WORDS, k=self.rng.randrange(10, 60))
            for _ in range(users)
        ]

    def turn(self) -> list[tuple[int, int]]:
        """The users in the order in which they ask, with the length of the answer that each wants."""
        order = list(range(len(self.prompts)))
        self.rng.shuffle(order)
        return [(user, self.rng.choice((5, 17, 30))) for user in order]

    def answered(self, turn: int, user: int, answer: list[int]) -> None:
        """Go on after an answer. One conversation in three goes on from before its end."""
        rng = random.Random(f"{turn} {user}")
        prompt = self.prompts[user] + answer + rng.choices(WORDS, k=20)
        self.prompts[user] = prompt[:-30] + [499] * 3 if (turn + user) % 3 == 0 else prompt


def options_of(told: argparse.Namespace) -> dict[str, Any]:
    """What ``sglang.Engine`` is made with."""
    options: dict[str, Any] = {
        "model_path": told.model, "device": "cpu", "dtype": "float32", "attention_backend": "torch_native",
        "sampling_backend": "pytorch", "grammar_backend": "none", "disable_cuda_graph": True,
        "skip_tokenizer_init": True, "page_size": told.page, "disable_overlap_schedule": told.no_overlap,
        "max_total_tokens": told.tokens, "chunked_prefill_size": 128, "max_running_requests": 6, "random_seed": 1,
        "mem_fraction_static": 0.3,
    }  # fmt: skip
    if told.cache == "off":
        options["disable_radix_cache"] = True
    elif told.cache != "own":
        options["radix_cache_backend"] = told.cache
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder that tests.engines.models has written")
    parser.add_argument("--cache", default="prefixloom", help="off, own or prefixloom")
    parser.add_argument("--page", type=int, default=1)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--tokens", type=int, default=1500, help="slots of the pool")
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--answers", type=Path, help="where all answers are written")
    told = parser.parse_args()
    os.environ.update({**dict(EVERYWHERE), **dict(RELEASES["sglang"].settings), "OMP_NUM_THREADS": "1"})
    import sglang

    engine = sglang.Engine(**options_of(told))
    talk = Conversations(told.users, seed=7)
    answers: list[Any] = []
    cached = asked = 0
    for turn in range(told.turns):
        order = talk.turn()
        prompts = [talk.prompts[user] for user, _ in order]
        wanted = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for _, count in order]
        found = engine.generate(input_ids=prompts, sampling_params=wanted)
        for (user, _), prompt, each in zip(order, prompts, found, strict=True):
            answers.append([turn, user, each["output_ids"]])
            cached += each["meta_info"]["cached_tokens"]
            asked += len(prompt)
            talk.answered(turn, user, each["output_ids"])
    if told.answers is not None:
        told.answers.write_text(json.dumps(sorted(answers)))
    print(f"{told.cache}, pages of {told.page}: {cached} of {asked} tokens were cached")
    engine.shutdown()


if __name__ == "__main__":
    main()
