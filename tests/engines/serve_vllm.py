"""A child with one vLLM engine: starts it, sends the traffic, and asks vLLM whether all blocks are free at the end.

Run in vLLM's environment: ``python -m tests.engines.serve_vllm TOLD.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.companions import RANK
from tests.engines.driving import Answer, drive, finish, margin
from tests.engines.traffic import Turn
from tests.engines.worlds import ADAPTERS

FIXED: dict[str, Any] = {
    "enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False, "seed": 1, "max_logprobs": 4,
}  # fmt: skip


def options(told: dict[str, Any]) -> dict[str, Any]:
    chosen = dict(
        FIXED, model=told["model"], dtype=told["dtype"], num_gpu_blocks_override=told["blocks"],
        max_model_len=told["longest"], max_num_batched_tokens=told["chunk"], max_num_seqs=told["traffic"]["wave"],
        enable_prefix_caching=told["mode"] != "off", block_size=told["page"], **told["extra"],
    )  # fmt: skip
    if told["adapters"]:
        chosen |= {"enable_lora": True, "max_loras": len(ADAPTERS), "max_lora_rank": RANK}
    if told["mode"] == "prefixloom":
        chosen["kv_transfer_config"] = {
            "kv_connector": "PrefixloomConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": told["connector"],
        }  # fmt: skip
    return chosen


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    import vllm
    from vllm.lora.request import LoRARequest

    begun = time.monotonic()
    engine = vllm.LLM(**options(told))
    started = time.monotonic() - begun

    def prompt(turn: Turn) -> dict[str, Any]:
        world = turn.conversation.world
        salted = {"cache_salt": f"salt {world}"} if world and not told["adapters"] else {}
        return {"prompt_token_ids": list(turn.prompt), **salted}

    def adapter(turn: Turn) -> Any:
        name = ADAPTERS[turn.conversation.world] if told["adapters"] else None
        return name and LoRARequest(name, turn.conversation.world, told["adapters"][name])

    def generate(turns: Sequence[Turn]) -> list[Answer]:
        outputs = engine.generate(
            [prompt(turn) for turn in turns],
            [
                vllm.SamplingParams(
                    temperature=0, max_tokens=turn.answer_length, ignore_eos=True, logprobs=2, detokenize=False
                )
                for turn in turns
            ],
            use_tqdm=False,
            lora_request=[adapter(turn) for turn in turns] if told["adapters"] else None,
        )
        answers = []
        for output in outputs:
            (answer,) = output.outputs
            tokens = list(answer.token_ids)
            answers.append(
                Answer(
                    tokens,
                    [best[token].logprob for token, best in zip(tokens, answer.logprobs, strict=True)],
                    [margin([each.logprob for each in best.values()]) for best in answer.logprobs],
                    output.num_cached_tokens,
                )
            )
        return answers

    result = drive(told, generate)
    checks = {"all blocks free": bool(engine.reset_prefix_cache())}  # vLLM refuses while a block is in use
    result |= {"started": started, "engine": vllm.__version__, "checks": checks}
    result["counts"] = {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if hasattr(metric, "value") and ("prefix" in metric.name or "preempt" in metric.name)
    }
    finish(told, result)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
