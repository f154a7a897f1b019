"""A real vLLM engine publishes its events: what a router reads of the device and of our host tier fits together.

Run in vLLM's environment: ``python -m tests.engines.events_vllm FOLDER``, where FOLDER has a model that
``python -m tests.engines.models`` made. It exits with 1 if a block of the host has a hash, tokens or a parent that
vLLM's own events of the same block do not have, or if what the host announces is not what its books say.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

MEDIA = ("GPU", "CPU")


def read(socket: Any, first: int | None, seconds: float) -> tuple[list[Any], int | None]:
    """Return the events that have come, and the number of the batch that follows.

    ``first``: the number of the next batch. None: nothing has come yet.
    """
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    found: list[Any] = []
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    while socket.poll(int(seconds * 1000)):
        _, number, batch = socket.recv_multipart()
        if first not in (None, int.from_bytes(number, "big")):
            raise RuntimeError(f"batch {first} was lost on its way: run it again")
        found += decoder.decode(batch).events
        first = int.from_bytes(number, "big") + 1
    return found, first


def links(event: Any) -> dict[Any, tuple[Any, ...]]:
    """Return by block of an event that stores: its parent, tokens, size and extra keys, its group's kind and window.

    vLLM's own events of a window leave out blocks, and have the tokens of all: of their blocks nothing is known.
    """
    if len(event.token_ids) != event.block_size * len(event.block_hashes):
        return dict.fromkeys(event.block_hashes, ())
    parent, found = event.parent_block_hash, {}
    for at, each in enumerate(event.block_hashes):
        tokens = tuple(event.token_ids[at * event.block_size : (at + 1) * event.block_size])
        extra = event.extra_keys[at] if event.extra_keys else None
        rest = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.lora_name
        found[each] = (parent, tokens, event.block_size, extra and tuple(extra), *rest)
        parent = each
    return found


def main(folder: str) -> int:
    import vllm
    import zmq

    rng = random.Random("events")
    shared = [rng.randrange(200) for _ in range(100)]
    received: dict[tuple[str, int], dict[Any, tuple[Any, ...]]] = {}
    seen: dict[int, dict[Any, tuple[Any, ...]]] = {}
    counts = dict.fromkeys(("GPU stored", "CPU stored", "GPU removed", "CPU removed", "cleared"), 0)
    wrong: list[str] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe("")
        socket.bind("tcp://127.0.0.1:*")  # vLLM connects to an address that names a host
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        engine = vllm.LLM(
            folder, enforce_eager=True, skip_tokenizer_init=True, seed=1, dtype="float32", block_size=32,
            num_gpu_blocks_override=64, max_model_len=512, max_num_batched_tokens=256, enable_prefix_caching=True,
            kv_transfer_config={
                "kv_connector": "PrefixloomConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"blocks": 60},
            },
            kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint},
        )  # fmt: skip
        _, following = read(socket, None, 1.0)  # what it tells of while it starts
        connector = engine.llm_engine.engine_core.engine_core.scheduler.connector  # this process has the scheduler
        take, spent = connector.take_events, list[float]()

        def timed() -> list[Any]:
            begun = time.thread_time()
            found = [*take()]
            spent.append(time.thread_time() - begun)
            return found

        connector.take_events = timed
        for turn in range(14):
            tokens = [*shared[: rng.randrange(101)], *(rng.randrange(200) for _ in range(rng.randrange(40, 150)))]
            prompt: dict[str, Any] = {"prompt_token_ids": tokens}
            if turn % 4 == 3:
                prompt["cache_salt"] = "pepper"
            engine.generate(prompt, vllm.SamplingParams(max_tokens=6, temperature=0, detokenize=False), use_tqdm=False)
            events, following = read(socket, following, 0.4)
            for event in events:
                if not hasattr(event, "medium"):
                    counts["cleared"] += 1
                    continue
                assert event.medium in MEDIA
                blocks = received.setdefault((event.medium, event.group_idx), {})
                if hasattr(event, "token_ids"):
                    made = links(event)
                    if event.medium == "GPU":
                        seen.setdefault(event.group_idx, {}).update(made)
                    blocks.update(made)
                    counts[f"{event.medium} stored"] += len(made)
                else:
                    for each in event.block_hashes:
                        if blocks.pop(each, None) is None and event.medium == "CPU":
                            wrong.append("the host removes a block that it has not announced")
                    counts[f"{event.medium} removed"] += len(event.block_hashes)
    for (medium, group), blocks in received.items():
        for each, link in blocks.items() if medium == "CPU" else ():
            theirs = seen.get(group, {}).get(each)
            if theirs is None and link[-2] is None:  # of a window, the device keeps fewer blocks than the host
                wrong.append(f"vLLM has announced no block of group {group} with this hash")
            elif theirs and theirs[1:] != link[1:]:
                wrong.append(f"group {group}: {link} and in vLLM's event {theirs}")
    print({f"{medium} group {group}": len(blocks) for (medium, group), blocks in sorted(received.items())}, counts)
    told = counts["CPU stored"] + counts["CPU removed"]
    print(
        f"the scheduler's thread took {1e6 * sum(spent) / max(told, 1):.0f} us for a block that comes or goes "
        f"({told} did), at most {1e3 * max(spent):.2f} ms in one of {len(spent)} steps"
    )
    print("\n".join(f"WRONG {each}" for each in wrong[:10]) or "all is well")
    return int(bool(wrong) or not counts["CPU stored"] or not counts["CPU removed"])


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sys.exit(main(sys.argv[1]))
