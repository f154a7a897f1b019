"""``prefixloom serve``: a server for one model, in front of the reference engine and its cache."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from prefixloom import CompositionError, InputError, Traffic, compose, make_component, parse_memory
from prefixloom.connections import read_keys

from ..serving.interrupts import reraise_interrupts

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ..contract.model import Model
    from ..contract.texts import Tokenizer
    from .access import Hosts
    from .app import Server
    from .reading.processes import TextProcesses

NUMBERS = {
    "port": (0, 65535),
    "page_size": (1, 4096),
    "max_running": (1, 4096),
    "max_queue": (0, 1 << 20),
    "chunk": (1, 1 << 20),
    "speculate": (0, 16),
    "threads": (1, 1024),
    "max_answer": (1, 1 << 20),
    "seed": (0, 1 << 62),
    "timeout": (1, 1 << 20),
    "drain": (0, 1 << 20),
    "context": (1, 1 << 31),
}
"""The least and the greatest value of each option that is a whole number."""
SIZES = ("memory", "host_memory", "max_body", "max_bodies", "trace_size", "record_size")
LAST_SECONDS = 5
"""How long clients may take to read the error of an answer that the end of the server has cut."""
MOST_FILES = 1 << 16
BUILT_IN = "prefixloom-threeway"
OBSERVERS = "prefixloom.observers"
"""The group of entry points of what follows a cache: called with the cache, where to publish, ``keys`` and
``in_clear``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # ``settings_of`` converts the numbers: argparse would print the whole usage with every mistake.
    model = parser.add_argument_group("the model")
    model.add_argument("--model", metavar="FOLDER", help="of a Hugging Face model (default: the built-in one)")
    model.add_argument("--name", help="of the model, as clients call it (default: the folder's)")
    model.add_argument("--dtype", default="auto", help="of its weights (default: as in its config)")
    model.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    model.add_argument("--seed", default="0", metavar="N", help="of the built-in model's random weights (default: 0)")
    model.add_argument("--context", metavar="N", help="tokens of a prompt and its answer (default: as in its config)")
    model.add_argument("--threads", metavar="N", help="of torch on a CPU (default: as torch decides)")
    cache = parser.add_argument_group("the cache")
    cache.add_argument("--memory", default="1GiB", metavar="SIZE", help="of the cache on the device (default: 1GiB)")
    cache.add_argument(
        "--traffic", metavar="NAME=NUMBER,...", default="",
        help="typical requests, for which memory is divided, such as prompt=4096,output=512,shared=0.5 (the default)",
    )  # fmt: skip
    cache.add_argument("--page-size", default="16", metavar="N", help="tokens of a page (default: 16)")
    cache.add_argument("--host-memory", metavar="SIZE", help="of the host, for what the device cannot hold")
    cache.add_argument(
        "--store",
        metavar="URL",
        help="behind the host's memory, such as file:/var/cache/prefixes or redis://HOST:6379/0",
    )
    cache.add_argument(
        "--store-keep", default="through", choices=("through", "selective", "back"),
        help="what is written to the store: all, what was hit twice, or what the host is about to lose",
    )  # fmt: skip
    cache.add_argument(
        "--events", metavar="ENDPOINT", help="publish what is cached for routers, such as at tcp://127.0.0.1:5557"
    )
    cache.add_argument(
        "--events-keys", metavar="FILE", help="with the keys of both sides: only who has them may follow"
    )
    cache.add_argument(
        "--events-in-clear",
        action="store_true",
        help="publish to whoever reaches the port, which has all prompts' tokens",
    )
    apart = parser.add_argument_group("prefill apart from decode")
    apart.add_argument(
        "--prefill", metavar="ADDRESS,...", help="of servers that compute prompts, such as tcp://127.0.0.1:5600"
    )
    apart.add_argument("--as-prefill", metavar="ADDRESS", help="compute prompts for servers that connect there")
    apart.add_argument("--prefill-keys", metavar="FILE", help="with the keys of both sides, for other machines")
    apart.add_argument("--prefill-mover", choices=("nixl",), help="moves content past the connection")
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    serving.add_argument(
        "--allow-host", metavar="NAME,...", default="", help="further names of this server, as behind a proxy; *: any"
    )
    serving.add_argument("--port", default="8000", metavar="N", help="default: 8000; 0: any that is free")
    serving.add_argument("--keys", metavar="FILE", help="the keys of tenants, in TOML (default: nobody needs one)")
    serving.add_argument("--max-running", default="16", metavar="N", help="answers at once (default: 16)")
    serving.add_argument("--max-queue", default="1024", metavar="N", help="requests that may wait (default: 1024)")
    serving.add_argument("--chunk", default="512", metavar="N", help="tokens of one step (default: 512)")
    serving.add_argument("--speculate", default="0", metavar="N", help="tokens guessed ahead (default: 0)")
    serving.add_argument("--max-body", default="8MiB", metavar="SIZE", help="of a request (default: 8MiB)")
    serving.add_argument(
        "--max-bodies", default="256MiB", metavar="SIZE", help="of all requests that are read at once (default: 256MiB)"
    )
    serving.add_argument(
        "--max-answer", default="2048", metavar="N", help="tokens, if a chat does not say how many (default: 2048)"
    )
    serving.add_argument(
        "--no-insight", dest="insight", action="store_false", help="no metrics, no page, and no history of misses"
    )
    serving.add_argument("--otlp", metavar="URL", help="a collector of OpenTelemetry for the span of each request")
    serving.add_argument("--trace", metavar="FILE", help="write what the engine does, for ui.perfetto.dev")
    serving.add_argument("--trace-size", default="1GiB", metavar="SIZE", help="the trace ends there (default: 1GiB)")
    serving.add_argument(
        "--record", metavar="FILE", help="write what the cache is asked, without text, for `prefixloom replay`"
    )
    serving.add_argument(
        "--record-size", default="1GiB", metavar="SIZE", help="the recording ends there (default: 1GiB)"
    )
    serving.add_argument("--timeout", default="600", metavar="S", help="seconds of an answer (default: 600)")
    serving.add_argument(
        "--drain", default="30", metavar="S", help="seconds that the end waits for answers and store (default: 30)"
    )


@attrs.frozen
class ServeSettings:
    """The options, checked and converted: ``numbers`` and ``sizes`` by name.

    ``traffic``  what memory is divided for
    ``prefill``  the addresses of prefill servers; None: prompts are computed here
    """

    args: argparse.Namespace
    numbers: dict[str, int]
    sizes: dict[str, int]
    traffic: Traffic
    prefill: list[str] | None = None


def settings_of(args: argparse.Namespace) -> ServeSettings:
    numbers = {}
    for name, (low, high) in NUMBERS.items():
        text, option = getattr(args, name), "--" + name.replace("_", "-")
        if text is None:
            continue
        try:
            numbers[name] = int(text)
        except ValueError:
            raise InputError(f"{option} takes a whole number, got {text!r}") from None
        if not low <= numbers[name] <= high:
            raise InputError(f"{option} must be from {low} to {high}, got {text}")
    sizes = {}
    for name in SIZES:
        if getattr(args, name) is not None:
            sizes[name] = parse_memory(getattr(args, name), "--" + name.replace("_", "-"))
    if args.store is not None and "host_memory" not in sizes:
        raise InputError("--store stands behind the host's memory: give --host-memory as well, such as 8GiB")
    check_events(args)
    traffic = Traffic.parse(args.traffic, running=numbers["max_running"], chunk=numbers["chunk"])
    return ServeSettings(args, numbers, sizes, traffic, prefill_addresses(args))


def check_events(args: argparse.Namespace) -> None:
    """Read the keys of followers. With tenants' keys, events are not for whoever reaches their port."""
    if args.events is None and (args.events_keys is not None or args.events_in_clear):
        raise InputError("--events-keys and --events-in-clear go with --events")
    if args.events_keys is not None:
        read_keys(args.events_keys, "server")
    elif args.events is not None and args.keys is not None and not args.events_in_clear:
        raise InputError(
            "with --keys, events would tell every program of this machine the tokens of all tenants: give "
            "--events-keys FILE, which prefixloom.connections.write_keys makes, or --events-in-clear"
        )


def prefill_addresses(args: argparse.Namespace) -> list[str] | None:
    """The addresses of prefill servers, checked with the keys for them. None: prompts are computed here."""
    if args.prefill is None and args.as_prefill is None:
        if args.prefill_keys is not None or args.prefill_mover is not None:
            raise InputError("--prefill-keys and --prefill-mover go with --prefill or --as-prefill")
        return None
    if args.prefill is not None and args.as_prefill is not None:
        raise InputError(
            "--prefill has prompts computed by others, and --as-prefill computes those of others: give one"
        )
    if args.keys is not None and args.prefill_keys is None:
        raise InputError(
            "with --keys, every program of this machine could read what is computed for tenants, or hand over other "
            "content: give --prefill-keys FILE, which prefixloom.connections.write_keys makes"
        )
    from ..disaggregation.addresses import check_address

    if args.as_prefill is not None:
        check_address(args.as_prefill, "server", args.prefill_keys)
        return None
    addresses = [each.strip() for each in args.prefill.split(",") if each.strip()]
    if args.prefill_keys is not None:
        read_keys(args.prefill_keys, "client")
    for each in addresses:
        check_address(each, "client", args.prefill_keys)
    return addresses


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns 1 if the engine failed."""
    settings = settings_of(args)
    try:
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise CompositionError(
            f"serving needs the package {error.name!r}: install the extra, pip install 'prefixloom[serve]'"
        ) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        with reraise_interrupts():
            import torch
    if "threads" in settings.numbers:
        torch.set_num_threads(settings.numbers["threads"])
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("prefixloom.server").setLevel(logging.INFO)  # which tells what administrators do
    return _serve(settings)


@attrs.frozen
class Assembled:
    """A server that is ready to be run.

    ``about``      its model, in words
    ``publisher``  of its events; None: of none
    ``prefill_at`` where servers find it whose prompts it computes; "": it computes none
    ``set_peers``  tells it the addresses of prefill servers, in the engine's thread
    """

    app: ASGIApp
    server: Server
    about: str
    publisher: Any
    prefill_at: str
    set_peers: Callable[[list[str]], None]


def assembled(settings: ServeSettings, failed: Callable[[BaseException], None]) -> Assembled:
    """Make the engine, in a thread of its own, and the application in front of it.

    ``failed`` is called in the event loop of the application if the engine is given up.
    """
    from .reading.processes import TextProcesses

    texts = TextProcesses(text_of(settings.args, images=True))
    try:
        return _assembled(settings, failed, texts)
    except BaseException:
        texts.close()
        raise


def _assembled(settings: ServeSettings, failed: Callable[[BaseException], None], texts: TextProcesses) -> Assembled:
    from ..contract.observer import Observer, Polled
    from ..serving.driving import DrivenEngine
    from ..serving.engine import Engine
    from ..tracing.trace import Trace
    from .access import Access, read_tenants
    from .admin import Admin, AttachedStore
    from .app import Limits, Server, make_app
    from .worker import EngineWorker

    args, numbers, sizes = settings.args, settings.numbers, settings.sizes
    access = Access() if args.keys is None else read_tenants(Path(args.keys))
    trace = None if args.trace is None else Trace(args.trace, size=sizes["trace_size"])
    model, about = model_of(args)
    identity = getattr(model, "identity", None)
    tier = None
    if "host_memory" in sizes:
        tier = make_component("hicache", "host", memory=sizes["host_memory"], identity=identity, keep=args.store_keep)
    store = AttachedStore(tier)
    make_publisher = None if args.events is None else observer_named("events")
    observers: list[Observer] = [] if trace is None else [trace]
    closing: list[Callable[[], None]] = [] if trace is None else [trace.close]
    publishers: list[Any] = []
    set_peers: list[Callable[[list[str]], None]] = []
    prefill_at: list[str] = []

    def apart(engine: Engine) -> DrivenEngine:
        """The engine with the processes that compute for it, or for which it computes."""
        if settings.prefill is None and args.as_prefill is None:
            return engine
        from ..disaggregation import DecodeEngine, PrefillServer

        mover = None
        if args.prefill_mover is not None:
            from ..disaggregation.nixl_mover import NixlMover

            mover = NixlMover()
            closing.append(mover.close)
        if settings.prefill is not None:
            decode = DecodeEngine(engine, settings.prefill, keys=args.prefill_keys, mover=mover)
            set_peers.append(decode.set_peers)
            return decode
        prefill = PrefillServer(engine, args.as_prefill, keys=args.prefill_keys, mover=mover)
        prefill_at.append(prefill.address)
        return prefill

    def make() -> DrivenEngine:
        cache = compose(
            model.config,
            plugins=[] if tier is None else [tier],
            memory=sizes["memory"],
            page_size=numbers["page_size"],
            traffic=settings.traffic,
            device=args.device,
            policy="priority",
            shares=access.cache_shares,
            max_rewind=numbers["speculate"],
        )
        if args.store is not None:
            store.attach(args.store)
        if make_publisher is not None:
            publisher = make_publisher(cache, args.events, keys=args.events_keys, in_clear=args.events_in_clear)
            publishers.append(publisher)
            observers.append(Polled(publisher.poll))
            closing.append(publisher.close)
        if args.record is not None:
            from prefixloom.lab import record

            cache = recorded = record(cache, args.record, size=sizes["record_size"])
            closing.append(recorded.finish)
        engine = Engine(
            model, cache, chunk=numbers["chunk"], max_running=numbers["max_running"], policy="priority",
            speculate=numbers["speculate"], observers=observers, shares=access.shares,
        )  # fmt: skip
        try:
            return apart(engine)
        except BaseException:
            engine.close()
            raise

    def ended() -> None:
        store.close()
        texts.close()
        for close in closing:
            close()

    running = numbers["max_running"]
    worker = EngineWorker(make, running + numbers["max_queue"], failed, ended, running=running, shares=access.shares)
    limits = Limits(
        body=sizes["max_body"],
        bodies=sizes["max_bodies"],
        seconds=numbers["timeout"],
        answer=numbers["max_answer"],
        drain_seconds=numbers["drain"],
        context=numbers.get("context", 0),
    )
    name = name_of(args)
    server = Server(worker, texts, access, limits, name, f"fp_{identity.digest[:12]}" if identity else "fp_unknown")
    routes = Admin(server, store).routes()
    if args.insight:
        from .insight import Insight

        routes += Insight(server).routes()
    app: ASGIApp = make_app(server, routes, hosts_of(args))
    if args.otlp is not None:
        from .telemetry import Telemetry, batches_to

        app = Telemetry(worker, name, [batches_to(args.otlp)]).around(app)
    return Assembled(
        app, server, about, publishers[0] if publishers else None, prefill_at[0] if prefill_at else "",
        set_peers[0] if set_peers else lambda addresses: None,
    )  # fmt: skip


def hosts_of(args: argparse.Namespace, bound: str = "") -> Hosts:
    """The names of the server. ``bound``: where it listens, if its options do not say so."""
    from .access import Hosts

    more = frozenset(each.strip().lower() for each in args.allow_host.split(",") if each.strip())
    return Hosts(bound or args.host, more)


def name_of(args: argparse.Namespace) -> str:
    """The name of the model, as clients call it."""
    return args.name or (BUILT_IN if args.model is None else Path(args.model).resolve().name)


def _serve(settings: ServeSettings) -> int:
    import uvicorn

    from .app import Announced
    from .connection import Connection

    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        http.should_exit = True

    args, numbers = settings.args, settings.numbers
    made = assembled(settings, failed)
    http = Announced(
        uvicorn.Config(
            made.app, host=args.host, port=numbers["port"], log_level="error", access_log=False, lifespan="on",
            timeout_graceful_shutdown=numbers["drain"] + LAST_SECONDS, backlog=1, http=Connection, ws="none",
        ),
        made.server,
        f"prefixloom serves {made.server.name} ({made.about})",
        [str(line) for line in made.server.worker.engine.cache.composition.sizing] + apart_lines(made, settings),
    )  # fmt: skip
    _allow_many_files()
    http.run()
    for error in failures:
        print(f"prefixloom: {error}", file=sys.stderr)
    return 1 if failures or not http.started else 0


def apart_lines(made: Assembled, settings: ServeSettings) -> list[str]:
    """Which other servers it works with, in words."""
    if settings.prefill is not None:
        return [f"prompts are computed at {', '.join(settings.prefill) or 'addresses that come'}, or else here"]
    return [f"computes prompts for servers with --prefill {made.prefill_at}"] if made.prefill_at else []


def _allow_many_files() -> None:
    """Each connection is an open file, of which a process often may have 1024 only, if it does not ask for more."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def observer_named(name: str) -> Callable[..., Any]:
    """What makes an observer of a cache, from the package that is installed for it."""
    for point in importlib.metadata.entry_points(group=OBSERVERS, name=name):
        try:
            make: Callable[..., Any] = point.load()
        except ModuleNotFoundError as error:
            raise CompositionError(
                f"--{name} needs the package {error.name!r}: install the extra, pip install 'prefixloom[{name}]'"
            ) from error
        return make
    raise CompositionError(f"--{name} needs an installed package that has {name!r} in the group {OBSERVERS!r}")


def model_of(args: argparse.Namespace) -> tuple[Model, str]:
    """The model, and a description."""
    if args.model is None:
        from ..threeway.model import ThreeWay
        from ..threeway.text import text_sizes

        dtype = "float32" if args.dtype == "auto" else args.dtype
        built_in = ThreeWay(text_sizes(), dtype=dtype, device=args.device, seed=int(args.seed))
        return built_in, f"{built_in.parameters / 1e6:.1f} million parameters, random"
    from ..hf import load

    loaded = load(args.model, dtype=args.dtype, device=args.device)
    count = sum(each.numel() for each in loaded.model.parameters())
    return loaded, f"{type(loaded.model).__name__}, {count / 1e6:.1f} million parameters"


def text_of(args: argparse.Namespace, *, images: bool) -> Callable[[], Tokenizer]:
    """What makes the tokenizer of a model. ``images``: with the processor of its images, if it takes any."""
    if args.model is None:
        from ..threeway.text import ByteTokenizer

        return ByteTokenizer
    from ..hf.text import load_tokenizer

    return functools.partial(load_tokenizer, args.model, images=images)
