"""A child with one SGLang engine: starts it, sends the traffic, and lets SGLang's idle checks look at the pools.

SGLang's scheduler checks its pools whenever it is idle, and ends the engine if a slot is lost, so this process ends
with an error then. Run in SGLang's environment: ``python -m tests.engines.serve_sglang TOLD.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.driving import Answer, drive, finish, margin
from tests.engines.plugins_sglang import drafts_in
from tests.engines.traffic import Turn
from tests.engines.worlds import ADAPTERS, SALTS

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
DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4, "attention_backend": "intel_amx", "disable_overlap_schedule": True,
}  # fmt: skip
"""A draft model proposes three tokens. SGLang has no overlap with one on a CPU, and its backend for CPUs alone."""


def options(told: dict[str, Any]) -> dict[str, Any]:
    page = told["page"]
    fixed = dict(FIXED)
    if told["draft"]:
        fixed |= {**DRAFTS, "speculative_draft_model_path": told["draft"]}
    if told["adapters"]:
        fixed |= {"lora_paths": told["adapters"], "lora_backend": "torch_native", "max_loras_per_batch": len(ADAPTERS)}
    chosen = {
        "model_path": told["model"], "page_size": page, "max_total_tokens": told["tokens"] // page * page,
        "chunked_prefill_size": told["chunk"], "max_running_requests": told["traffic"]["wave"],
        "disable_overlap_schedule": not told["overlap"],
    }  # fmt: skip
    return chosen | fixed | MODES[told["mode"]] | told["extra"]


def apart(told: Mapping[str, Any], turns: Sequence[Turn]) -> dict[str, Any]:
    """Return what keeps the requests of a wave apart."""
    worlds = [turn.conversation.world for turn in turns]
    if told["adapters"]:
        return {"lora_path": [ADAPTERS[world] for world in worlds]}
    if told["traffic"]["worlds"] == 1:
        return {}
    return {name: [SALTS[world].get(name, "") for world in worlds] for name in ("extra_key", "cache_salt")}


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    import sglang
    from sglang.srt.managers.io_struct import GenerateReqInput

    begun = time.monotonic()
    engine = sglang.Engine(**options(told))
    started = time.monotonic() - begun

    def ask(prompts: Sequence[Sequence[int]], lengths: Sequence[int], **more: Any) -> Any:
        asked = GenerateReqInput(
            input_ids=[list(each) for each in prompts],
            sampling_params=[{"temperature": 0, "max_new_tokens": each, "ignore_eos": True} for each in lengths],
            return_logprob=True,
            top_logprobs_num=2,
            **more,
        )
        return engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(asked, None)))

    def generate(turns: Sequence[Turn]) -> list[Answer]:
        names = {"rid": [turn.name for turn in turns]}
        outputs = ask(
            [turn.prompt for turn in turns], [turn.answer_length for turn in turns], **names, **apart(told, turns)
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
    if told["draft"]:
        drafts = drafts_in(Path(os.environ["DRAFTS"]))
        for answer in result["answers"]:
            answer["drafts"] = drafts.get(answer["name"], {})
    time.sleep(2)  # idle: the scheduler checks its pools
    ask([[9, 10, 11]], [1])  # it still lives, so they add up
    time.sleep(1)  # SGLang forgets nothing in the round in which it has answered
    flushed = bool(engine.flush_cache().success)
    time.sleep(2)
    ask([[9, 10, 11]], [1])
    result |= {"started": started, "engine": sglang.__version__, "checks": {"cache flushed": flushed, "idle": True}}
    finish(told, result)
    engine.shutdown()


if __name__ == "__main__":
    main()
