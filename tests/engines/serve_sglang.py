"""A child with one SGLang engine: starts it, sends the traffic, and lets SGLang's idle checks look at the pools.

SGLang's scheduler checks its pools whenever it is idle, and ends the engine if a slot is lost, so this process ends
with an error then. Run in SGLang's environment: ``python -m tests.engines.serve_sglang TOLD.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.driving import Answer, drive, finish, margin

FIXED: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "grammar_backend": "none", "disable_cuda_graph": True, "skip_tokenizer_init": True, "random_seed": 1,
    "mem_fraction_static": 0.3, "log_level": "info",
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "off": {"disable_radix_cache": True},
    "own": {},
    "prefixloom": {"radix_cache_backend": "prefixloom"},
}


def options(told: dict[str, Any]) -> dict[str, Any]:
    page = told["page"]
    return dict(
        FIXED, model_path=told["model"], page_size=page, max_total_tokens=told["tokens"] // page * page,
        chunked_prefill_size=told["chunk"], max_running_requests=told["traffic"]["wave"],
        disable_overlap_schedule=not told["overlap"], **MODES[told["mode"]], **told["extra"],
    )  # fmt: skip


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    import sglang

    begun = time.monotonic()
    engine = sglang.Engine(**options(told))
    started = time.monotonic() - begun

    def generate(prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Answer]:
        outputs = engine.generate(
            input_ids=[list(each) for each in prompts],
            sampling_params=[{"temperature": 0, "max_new_tokens": each, "ignore_eos": True} for each in lengths],
            return_logprob=True,
            top_logprobs_num=2,
        )
        answers = []
        for output in outputs:
            facts = output["meta_info"]
            answers.append(
                Answer(
                    output["output_ids"],
                    [each[0] for each in facts["output_token_logprobs"]],
                    [margin([each[0] for each in best]) for best in facts["output_top_logprobs"]],
                    facts["cached_tokens"],
                )
            )
        return answers

    result = drive(told, generate)
    time.sleep(2)  # idle: the scheduler checks its pools
    generate([[9, 10, 11]], [1])  # it still lives, so they add up
    flushed = bool(engine.flush_cache().success)
    time.sleep(2)
    generate([[9, 10, 11]], [1])
    result |= {"started": started, "engine": sglang.__version__, "checks": {"cache flushed": flushed, "idle": True}}
    finish(told, result)
    engine.shutdown()


if __name__ == "__main__":
    main()
