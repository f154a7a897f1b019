"""Real engines with and without our cache. ``python -m tests.engines run|short|restart|killed|theirs ...``"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.running import Bench, Failed, scene
from tests.engines.theirs import theirs
from tests.engines.verdict import BEHIND, cached, judge
from tests.engines.worlds import WAYS

PAGES = {"sglang": {}, "vllm": {"qwen3_next": 64, "qwen3_next_slow": 64, "qwen3_5": 64}}
"""Tokens of a page or block. vLLM rounds them up where a state is larger than a block, so they are given as it says."""
USUAL_PAGE = {"sglang": 1, "vllm": 32}
MODES = ("off", "off again", "off once more", "own", "prefixloom", "spoiled own", "spoiled prefixloom")
BLIND = "blind prefixloom"
"""A control: the cache does not see what keeps requests apart, or what a draft model adds to a token's key."""
STATES = ("qwen3_next", "qwen3_next_slow", "qwen3_5")
"""Models for which SGLang has its extra buffer of states, with overlap."""
CHUNKS = {"off again": 2, "off once more": 4}
"""How many times smaller chunks are: sums then run in another order, as a hit makes them do."""
HOST = {"memory": "64MiB"}
"""The host tier of runs in vLLM, unless told otherwise."""


def options_of(mode: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mode of a run, as its child is told."""
    first, last = mode.split()[0], mode.split()[-1]
    told = {**shared, "mode": last if first in ("spoiled", "blind") else first}
    told["spoil"], told["blind"] = first == "spoiled", first == "blind"
    told["chunk"] = shared["chunk"] // CHUNKS.get(mode, 1)
    return told


def comparison(bench: Bench, shared: Mapping[str, Any], modes: Sequence[str], label: str) -> bool:
    """Run the modes one after the other, say what came of it, and return whether all is well."""
    print(f"{label}: pools of {shared['tokens']} tokens, {shared['needed']} are needed", flush=True)
    results: dict[str, Any] = {}
    for mode in modes:
        begun = time.monotonic()
        settings = {"PREFIXLOOM_DEBUG": "1" if "prefixloom" in mode else "0"}
        if bench.engine == "sglang":
            settings |= {"SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
        else:
            settings |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        try:
            result = bench.run(options_of(mode, shared), f"{label} {mode}", settings)
        except Failed as failed:
            print(f"FAILED {failed}", flush=True)
            return False
        assert result is not None
        results[mode] = result
        took = time.monotonic() - begun
        counts = "".join(f", {name} {value}" for name, value in result.get("counts", {}).items() if value)
        print(f"  {mode}: {took:.0f} s, {cached(result['answers'])} cached{counts}", flush=True)
    buffered = bench.engine == "sglang" and shared["overlap"] and Path(shared["model"]).name in STATES
    return tell(*judge(results, BEHIND if buffered else 0.0))


def tell(said: Sequence[str], wrong: Sequence[str]) -> bool:
    print("\n".join(f"  {each}" for each in said))
    print("\n".join(f"  WRONG {each}" for each in wrong) or "  all is well", flush=True)
    return not wrong


def restart(bench: Bench, shared: dict[str, Any], label: str) -> bool:
    """Kill an engine in the midst of its traffic; another one on the same store must hit, and answer the same.

    The store is a folder, unless ``--connector`` names another one that is empty.
    """
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        store = {} if "store" in shared["connector"] else {"store": folder, "store_capacity": 1 << 28}
        shared = {**shared, "connector": {**shared["connector"], **store}}
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PREFIXLOOM_DEBUG": "1"}
        half = shared["traffic"]["requests"] // 2
        results: dict[str, Any] = {}
        try:
            for mode in ("off", *CHUNKS):
                results[mode] = bench.run(options_of(mode, shared), f"{label} {mode}", settings)
            told = options_of("prefixloom", shared)
            killed = bench.run(told, f"{label} killed", settings, stop_after=lambda answers: answers >= half)
            again = bench.run(told, f"{label} again", settings)
        except Failed as failed:
            print(f"FAILED {failed}")
            return False
    if killed is not None or again is None:
        print("WRONG the engine ended before it was killed")
        return False
    first = [each["cached"] for each in again["answers"][:8]]
    print(f"{label}: killed after {half} answers; of the first requests of the next engine {first} tokens were cached")
    said, wrong = judge({**results, "prefixloom": again}, restarted=True)
    if not first[0]:
        wrong.append("the store had nothing for the first request")
    return tell(said, wrong)


CALL = 90.0
"""Seconds to wait for a call of an engine one of whose processes was killed."""
KILLS = (("LLM", "engine"), ("LLM", "worker"), ("AsyncLLM", "engine"))
"""Who calls the engine, and which of its processes is killed."""


def killed(bench: Bench, shared: dict[str, Any], label: str) -> bool:
    """Kill a process in the midst of a load: memory must be gone, and a new engine right. Beside it, vLLM alone."""
    well = True
    print("| called by | killed | connector | the call ends after | with | memory is gone after | new engine |")
    print("|---|---|---|---|---|---|---|")
    for client, victim in KILLS:
        calls = {}
        for mode in ("own", "prefixloom"):
            told = {**options_of(mode, shared), "client": client, "victim": victim, "patience": CALL}
            with tempfile.TemporaryDirectory(dir=bench.folder) as hold:
                settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PREFIXLOOM_DEBUG": "1", "HOLD_LOADS": hold}
                told["hold"] = hold
                run = f"{label} {client} {victim} {mode}"
                try:
                    found = bench.run(told, run, settings, child_module="kill_vllm", plugins=["hold"])
                except Failed as failed:
                    print(f"FAILED {failed}")
                    return False
            assert found is not None
            calls[mode] = found["ended"] is not None, found["error"]
            ends = f"{found['ended']:.1f} s" if found["ended"] is not None else f"more than {CALL:.0f} s"
            says = [client, victim, "no" if mode == "own" else "yes", ends, found["error"] or ""]
            if mode == "prefixloom":
                right = found["same"] == [True, True] and found["cached"] > 0
                well &= found["mapped"] and found["gone"] is not None and right
                gone = "still there" if found["gone"] is None else f"{found['gone']:.1f} s"
                says += [gone, f"same answers, {found['cached']} tokens loaded" if right else f"WRONG {found['same']}"]
            else:
                says += ["", ""]
            print(f"| {' | '.join(says)} |", flush=True)
        if calls["own"] != calls["prefixloom"]:
            well = False
            print(f"WRONG with the connector the call ends otherwise: {calls}")
    return well


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    verbs = made.add_subparsers(dest="verb", required=True)
    for verb in ("run", "restart", "killed", "short", "theirs"):
        each = verbs.add_parser(verb)
        engines = ["vllm"] if verb == "killed" else [*PAGES]
        each.add_argument("engine", choices=engines, nargs="?" if verb == "short" else None)
        each.add_argument("--folder", type=Path, default=Path(".engines"), help="for environments, models and logs")
        each.add_argument("--environment", type=Path, help="a folder that tests.engines.environment made")
        each.add_argument("--version")
        if verb == "theirs":
            each.add_argument("--source", type=Path, help="the folder of its tests, in place of its release's")
            continue
        each.add_argument("--model", default="llama")
        each.add_argument("--requests", type=int, default=40)
        each.add_argument("--seed", type=int, default=20261125)
        each.add_argument("--fraction", type=float, default=0.3, help="of the memory that the traffic needs")
        each.add_argument("--page", type=int)
        each.add_argument("--no-overlap", action="store_true")
        each.add_argument("--dtype")
        each.add_argument("--modes")
        each.add_argument("--apart", choices=WAYS, default="none", help="what keeps requests apart")
        each.add_argument("--draft", action="store_true", help="with a draft model (EAGLE), in SGLang")
        each.add_argument("--extra", type=json.loads, default={}, help="more arguments of the engine, as JSON")
        each.add_argument("--connector", type=json.loads, default=HOST, help="kv_connector_extra_config, as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    told = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child of a run is ended too
    folder = told.folder.resolve()

    def bench_of(engine: str) -> Bench:
        return Bench(engine, folder, told.version, told.environment)

    def shared_of(bench: Bench, model: str, requests: int) -> dict[str, Any]:
        page = told.page or PAGES[bench.engine].get(model, USUAL_PAGE[bench.engine])
        made = scene(
            bench,
            model,
            requests,
            told.seed,
            told.fraction,
            page,
            not told.no_overlap,
            told.dtype,
            told.apart,
            told.draft,
        )
        return {**made, "extra": told.extra, "connector": told.connector}

    if told.verb == "short":
        well = True
        for engine, model in (("sglang", "cohere2"), ("vllm", "gemma3")):
            if told.engine in (None, engine):
                bench = bench_of(engine)
                modes = ("off", "prefixloom", "spoiled prefixloom")
                well &= comparison(bench, shared_of(bench, model, 40), modes, f"{engine} {model} short")
        return 0 if well else 1
    bench = bench_of(told.engine)
    if told.verb == "theirs":
        lines, enough = theirs(bench, told.source, told.version)
        print("\n".join(lines))
        return 0 if enough else 1
    shared = shared_of(bench, told.model, told.requests)
    label = f"{told.engine} {told.model} {told.requests}{' draft' if told.draft else ''}"
    label += f" {told.apart}" if told.apart != "none" else ""
    if told.verb == "killed":
        return 0 if killed(bench, shared, f"{label} killed") else 1
    if told.verb == "restart":
        return 0 if restart(bench, shared, f"{label} restart") else 1
    controls = (BLIND,) if told.apart != "none" or told.draft else ()
    modes = told.modes.split(",") if told.modes else (*MODES, *controls)
    return 0 if comparison(bench, shared, modes, label) else 1


if __name__ == "__main__":
    sys.exit(main())
