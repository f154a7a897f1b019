"""The application: from a checked file to a fleet that runs on Ray Serve, and back.

Ray's usage statistics are off, its dashboard is not started, and a cluster of our own listens on loopback alone. Its
processes have the priority of this one, where Ray would let everything else on the machine go first (niceness 15).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from prefixloom import CompositionError, PrefixloomError

from .config import FleetConfig, Role

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if (Path.home() / ".ray" / "auth_token").exists():  # a local cluster has made it, and wants it of whoever joins
    os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
try:
    import ray
    from ray import serve
    from ray._private.services import canonicalize_bootstrap_address, find_gcs_addresses
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation, RequestRouterConfig
    from ray.serve.context import _get_global_client
    from ray.serve.schema import LoggingConfig
except ModuleNotFoundError as error:
    raise CompositionError(f"a fleet needs the package {error.name!r}: pip install prefixloom-fleet") from error

LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Ray replaces 127.0.0.1 by the address of this machine in its network. Linux has all of 127.0.0.0/8 as loopback."""
STATS_SECONDS = 0.5
"""How often a replica tells its load."""
HEALTH_SECONDS = 2.0
HEALTH_PATIENCE = 15.0
"""How long a replica may take to say that it is well."""
CONNECT_SECONDS = 5.0
"""How long the head of a cluster may take to accept a connection."""


def start_ray(config: FleetConfig) -> None:
    """Join the cluster at ``config.address``, or begin one on this machine, which ends with this process."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if config.address:
        ray.init(address=reached(config.address), log_to_driver=False, logging_level="warning")
        return
    check_free(config)
    wanted = int((config.most + config.prefill) * config.cpus) + 4
    ray.init(
        address="local",  # without it Ray would join a cluster that it finds on this machine, or remembers
        num_cpus=max(wanted, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False,
        logging_level="warning", _node_ip_address=LOOPBACK,
    )  # fmt: skip


def check_free(config: FleetConfig) -> None:
    """Raise CompositionError if somebody listens at the fleet's port, which Ray would share without a word."""
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((config.host, config.port))
        except OSError as error:
            raise CompositionError(
                f"the fleet cannot take requests at {config.host}:{config.port} ([front] host, port): {error}"
            ) from error


def reached(address: str) -> str:
    """Return the address of a cluster whose head answers.

    ``NotRunning``: none does. Ray would wait for it for many minutes.
    """
    if address == "local" or "://" in address:
        raise NotRunning(f"the address of a Ray cluster is HOST:PORT or auto, got {address!r}")
    try:
        found = str(canonicalize_bootstrap_address(address))
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise NotRunning(f"no Ray cluster answers {where}: {str(error).strip().splitlines()[0]}") from error
    return found


def own_cluster() -> str:
    """Return the address of the cluster that a fleet on this machine has begun for itself, and not others.

    ``NotRunning``: there is none, or there are several.
    """
    found = sorted(find_gcs_addresses())
    if sys.platform == "linux":
        found = [each for each in found if each.rpartition(":")[0] == LOOPBACK]
    if len(found) != 1:
        told = f"there are several ({', '.join(found)}): say by --address which one" if found else "there is none"
        raise NotRunning(f"no fleet is known that runs on this machine in a cluster of its own: {told}")
    return str(found[0])


def deploy(config: FleetConfig, revision: str = "1") -> str:
    """Run the fleet, or change the one that runs into this one, and wait until it answers. Returns its address.

    ``revision``: if it is another one than before, all replicas are replaced, a few at a time.
    """
    from .front import Front
    from .replica import Replica
    from .router import PolicyRouter

    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    settings = config.settings_of(config.role)
    scaled: dict[str, Any] = {"num_replicas": config.least}
    if config.most > config.least:
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=config.least, max_replicas=config.most,
                target_ongoing_requests=settings.numbers["max_running"],
                upscale_delay_s=5.0, downscale_delay_s=60.0,
            )
        }  # fmt: skip
    patience = float(settings.numbers["drain"]) + 10.0

    def servers(name: str, role: Role, policy: str, **count: Any) -> Any:
        """Return a deployment of replicas that do this."""
        numbers = config.settings_of(role).numbers
        return serve.deployment(Replica).options(
            name=name,
            max_ongoing_requests=numbers["max_running"] + numbers["max_queue"],
            max_queued_requests=config.waiting,
            request_router_config=RequestRouterConfig(
                request_router_class=PolicyRouter,
                request_router_kwargs={"policy": policy, "events": config.events},
                request_routing_stats_period_s=STATS_SECONDS,
                request_routing_stats_timeout_s=10.0,
            ),
            ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
            health_check_period_s=HEALTH_SECONDS,
            health_check_timeout_s=HEALTH_PATIENCE,
            graceful_shutdown_timeout_s=float(numbers["drain"]) + 10.0,
            graceful_shutdown_wait_loop_s=0.5,
            max_surge_percent=config.surge,
            max_constructor_retry_count=2,
            logging_config=quiet,
            **count,
        )

    front = serve.deployment(Front).options(
        name="Front",
        num_replicas=config.fronts,
        max_ongoing_requests=1 << 14,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_PATIENCE,
        graceful_shutdown_timeout_s=patience,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=quiet,
    )
    start_http(config, quiet)
    prefill = None
    if config.prefill:
        made = servers("Prefill", "prefill", config.prefill_policy, num_replicas=config.prefill)
        prefill = made.bind(config.options_of("prefill"), revision, "prefill", events=config.events)
    replicas = servers("Replica", config.role, config.policy, **scaled)
    answering = replicas.bind(config.options_of(config.role), revision, config.role, prefill, events=config.events)
    target = front.bind(config, answering, prefill)
    try:
        serve.run(target, name=config.name, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        raise CompositionError(f"the fleet did not start: {why(config) or error}") from error
    return f"http://{config.host}:{config.port}/v1"


def start_http(config: FleetConfig, logging_config: LoggingConfig) -> None:
    """Have Serve take requests at the address of the fleet. ``CompositionError``: it takes them at another address, or
    for another application, from which Serve would take them away without a word.
    """
    options = HTTPOptions(host=config.host, port=config.port, request_timeout_s=None)
    serve.start(ProxyLocation.HeadOnly, http_options=options, logging_config=logging_config)
    client = _get_global_client()
    running = client.http_config
    if (running.host, running.port) != (config.host, config.port):
        raise CompositionError(
            f"Ray Serve runs in this cluster already and takes requests at {running.host}:{running.port}: say so in "
            "[front], or end it with `serve shutdown`"
        )
    for name, each in client.get_serve_details()["applications"].items():
        if name != config.name and each["route_prefix"] == "/":
            raise CompositionError(
                f"the application {name!r} takes the requests in this cluster: end it, or give this fleet its name or "
                "another cluster"
            )


def why(config: FleetConfig) -> str:
    """Return what Ray says of the deployments that do not run: of a traceback, its last line."""
    told = serve.status().applications.get(config.name)
    messages = [] if told is None else [each.message for each in told.deployments.values() if each.message]
    return "; ".join(message.strip().splitlines()[-1].strip() for message in messages)


class NotRunning(PrefixloomError):
    """There is no such cluster, or no such fleet in it."""


@contextlib.contextmanager
def joined(config: FleetConfig, address: str) -> Iterator[None]:
    """Join the cluster in which the fleet runs: at ``address``, at the one of its file, or the fleet's own one here.

    ``NotRunning``: it does not run there.
    """
    there = attrs.evolve(config, address=address or config.address or own_cluster())
    start_ray(there)
    try:
        if not is_running(config):
            raise NotRunning(f"no fleet {config.name!r} runs there: start it with `prefixloom fleet deploy`")
        yield
    finally:
        end_ray(there)


def cluster_address() -> str:
    """Return where further processes join the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def is_running(config: FleetConfig) -> bool:
    """Return whether the application is there, in the cluster that this process has joined."""
    return config.name in serve.status().applications


def stop(config: FleetConfig) -> None:
    """End the application: what runs is answered, what waits for the store is written.

    Serve ends too, if nothing else runs on it in a cluster that others started. Else it would keep its address.
    """
    with contextlib.suppress(RayActorError):  # who deployed it has ended the cluster meanwhile
        serve.delete(config.name)
    if config.address and not serve.status().applications:
        serve.shutdown()


def end_ray(config: FleetConfig) -> None:
    """Leave the cluster. One of our own ends, with Serve."""
    with contextlib.suppress(Exception):
        if not config.address and ray.is_initialized():  # else Ray would look for a cluster, and end Serve there
            serve.shutdown()
    ray.shutdown()
