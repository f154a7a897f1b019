"""A child that kills a process of its vLLM engine in the midst of a load, and writes down what comes of it.

How long the call of ``generate`` goes on, with what error it ends, who still maps the connector's memory, and whether
a new engine gives the same answers. Without the connector it kills while tokens are decoded: what vLLM does by itself.

Run in vLLM's environment: ``python -m tests.engines.kill_vllm TOLD.json``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.models import VOCABULARY
from tests.engines.plugins_vllm import ARMED, HELD
from tests.engines.serve_vllm import options
from tests.engines.traffic import FIRST_TOKEN

PROMPTS, TOKENS, ANSWER = 8, 200, 8
LONG_ANSWER = 300
"""The tokens of an answer that is still being decoded when the process is killed."""
TITLES = {"engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}
"""How vLLM names its processes: the one with the scheduler, and the worker below it."""

Answers = list[list[int]]


def params(length: int) -> Any:
    import vllm

    return vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)


class Calls:
    """An engine that is called from this thread: ``vllm.LLM``."""

    def __init__(self, told: dict[str, Any]) -> None:
        import vllm

        self.engine = vllm.LLM(**told)

    def __call__(self, prompts: Sequence[list[int]], length: int) -> Answers:
        asked = [{"prompt_token_ids": each} for each in prompts]
        return [list(each.outputs[0].token_ids) for each in self.engine.generate(asked, params(length), use_tqdm=False)]


class Server:
    """An engine as vLLM's server has it: ``AsyncLLM``, in an event loop of its own."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = asyncio.run_coroutine_threadsafe(self._start(told), self.loop).result()
        self.count = 0

    @staticmethod
    async def _start(told: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**told))

    def __call__(self, prompts: Sequence[list[int]], length: int) -> Answers:
        self.count += 1
        return asyncio.run_coroutine_threadsafe(self._all(prompts, length), self.loop).result()

    async def _all(self, prompts: Sequence[list[int]], length: int) -> Answers:
        async def one(at: int, prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            asked = {"prompt_token_ids": prompt}
            async for answer in self.engine.generate(asked, params(length), f"{self.count}.{at}"):
                tokens = list(answer.outputs[0].token_ids)
            return tokens

        return list(await asyncio.gather(*(one(at, each) for at, each in enumerate(prompts))))


CLIENTS: dict[str, Any] = {"LLM": Calls, "AsyncLLM": Server}


def victims(title: str) -> list[int]:
    """Return the processes below this one that vLLM named so."""
    import psutil

    return [each.pid for each in psutil.Process().children(recursive=True) if title in " ".join(each.cmdline())]


def mapping(name: str) -> list[int]:
    """Return the processes of this machine that map a file of that name."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_text():
                found.append(int(maps.parent.name))
        except OSError:
            continue
    return found


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(told["hold"])
    for name in (ARMED, HELD):
        (folder / name).unlink(missing_ok=True)
    chosen = options(told)
    name = f"killed-{os.getpid()}"
    if told["mode"] == "prefixloom":
        chosen["kv_transfer_config"]["engine_id"] = name
    draw = random.Random(told["traffic"]["seed"])
    prompts = [[draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    ask = CLIENTS[told["client"]](chosen)
    before = ask(prompts, ANSWER)
    mapped = bool(mapping(name))
    ended: dict[str, Any] = {}
    thread = threading.Thread(target=call, args=(ask, prompts, ended), daemon=True)
    if told["mode"] == "prefixloom":
        (folder / ARMED).touch()
        thread.start()
        until = time.monotonic() + 60
        while not (folder / HELD).exists():
            assert time.monotonic() < until, "no load began"
            time.sleep(0.02)
    else:
        thread.start()
        time.sleep(2)
        assert thread.is_alive(), "the answers came before the process was killed"
    chosen_ones = victims(TITLES[told["victim"]])
    assert chosen_ones, "vLLM has no such process"
    killed = time.monotonic()
    for pid in chosen_ones:
        os.kill(pid, signal.SIGKILL)
    gone = None
    while time.monotonic() < killed + told["patience"] and (thread.is_alive() or gone is None):
        if gone is None and not mapping(name) and not any(Path("/dev/shm").glob(f"*{name}*")):
            gone = time.monotonic() - killed
        thread.join(0.05)
    result: dict[str, Any] = {
        "mapped": mapped, "gone": gone, "ended": None if thread.is_alive() else ended["at"] - killed,
        "error": ended.get("error"), "same": None,
    }  # fmt: skip
    if told["mode"] == "prefixloom":
        chosen["kv_transfer_config"]["engine_id"] = f"{name}-again"
        again = Calls(chosen)
        result["same"] = [again(prompts, ANSWER) == before, again(prompts, ANSWER) == before]
        result["cached"] = cached(again)
    Path(told["result"]).write_text(json.dumps(result))
    os._exit(0)  # a call may never end


def call(ask: Any, prompts: Sequence[list[int]], ended: dict[str, Any]) -> None:
    try:
        ask(prompts, LONG_ANSWER)
        ended["error"] = ""
    except BaseException as error:
        ended["error"] = type(error).__name__
    ended["at"] = time.monotonic()


def cached(ask: Calls) -> int:
    """Return tokens that the connector brought to the new engine."""
    named = "vllm:external_prefix_cache_hits"
    return sum(int(each.value) for each in ask.engine.get_metrics() if each.name.startswith(named))


if __name__ == "__main__":
    main()
