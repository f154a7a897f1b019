"""The workloads of ``python -m bench``, by name: each is a function ``module:function`` that returns samples by row.

A row's name ends with its unit. The function's parameters are the command's options. It runs in a process that
measures. The command itself imports its module only to read these parameters.
"""

from __future__ import annotations

USUAL = {
    "chat_turn": "bench.workloads.chat_turn:chat_turn",
    "bytecodes": "bench.workloads.chat_turn:bytecodes",
    "decode_step": "bench.workloads.decode_step:decode_step",
    "scale": "bench.workloads.scale:scale",
}
"""Run if no workload is named: the cache's own work."""
QUICK = USUAL | {
    "reaches": "bench.workloads.reaches:reaches",
    "host_tier": "bench.workloads.host_tier:host_tier",
    "stores": "bench.workloads.stores:stores",
    "tier_costs": "bench.workloads.tier_costs:tier_costs",
    "engine": "bench.workloads.engine:engine",
}
"""These do their work once in each round, without the garbage collector."""
LONG = {
    "watching": "bench.serving.watching:watching",
    "server": "bench.serving.server:server",
    "telemetry": "bench.serving.server:telemetry",
    "fleet_policies": "bench.serving.fleet_policies:fleet_policies",
    "policies": "bench.lab.policies:policies",
    "replay_speed": "bench.lab.speed:replay_speed",
    "sglang_trace": "bench.peers.sglang_trace:sglang_trace",
    "vllm_trace": "bench.peers.vllm_trace:vllm_trace",
    "vllm_copies": "bench.peers.vllm_copies:vllm_copies",
}
"""These take minutes, or compare their own sides in turn: they run once, unless rounds are asked for."""
WORKLOADS = QUICK | LONG
