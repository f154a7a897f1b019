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
    from ..contract.model import Model
    from ..contract.texts import Tokenizer
    from ..serving.driving import DrivenEngine
    from ..serving.engine import Engine
    from .access import Hosts
    from .reading.processes import TextProcesses

LAST_SECONDS = 5
"""How long clients may take to read the error of an answer that the end of the server has cut."""
MOST_FILES = 1 << 16
BUILT_IN = "prefixloom-threeway"
OBSERVERS = "prefixloom.observers"
"""The group of entry points of what follows a cache: called with the cache, where to publish, ``keys`` and
``in_clear``."""


SIZE = (1, 1 << 63)
"""What an option takes that is a number of bytes, such as 8GiB."""


@attrs.frozen
class Option:
    """An option ``--name`` of the command. ``takes``: the least and the greatest of a whole number; None: a text."""

    name: str
    help: str
    default: str | None = None
    metavar: str | None = None
    takes: tuple[int, int] | None = None
    choices: tuple[str, ...] | None = None

    def add_to(self, group: Any) -> None:
        """Add it to a parser, as a text: ``settings_of`` converts numbers, since argparse prints the whole usage."""
        shown = None if self.takes is None else "SIZE" if self.takes == SIZE else "N"
        more = f" (default: {self.default})" if self.default else ""
        group.add_argument(
            f"--{self.name}", default=self.default, help=self.help + more, metavar=self.metavar or shown,
            choices=self.choices,
        )  # fmt: skip

    def number(self, text: str) -> int:
        """Return the number that a text is."""
        if self.takes == SIZE:
            return parse_memory(text, f"--{self.name}")
        assert self.takes is not None
        low, high = self.takes
        try:
            found = int(text)
        except ValueError:
            raise InputError(f"--{self.name} takes a whole number, got {text!r}") from None
        if not low <= found <= high:
            raise InputError(f"--{self.name} must be from {low} to {high}, got {text}")
        return found


OPTIONS = {
    "the model": (
        Option("model", "of a Hugging Face model (default: the built-in one)", metavar="FOLDER"),
        Option("name", "of the model, as clients call it (default: the folder's)"),
        Option("dtype", "of its weights; auto: as in its config", "auto"),
        Option("device", "cpu, cuda or cuda:N", "cpu"),
        Option("seed", "of the built-in model's random weights", "0", takes=(0, 1 << 62)),
        Option("context", "tokens of a prompt and its answer (default: as in its config)", takes=(1, 1 << 31)),
        Option("threads", "of torch on a CPU (default: as torch decides)", takes=(1, 1024)),
    ),
    "the cache": (
        Option("memory", "of the cache on the device", "1GiB", takes=SIZE),
        Option(
            "traffic",
            "typical requests, for which memory is divided, such as prompt=4096,output=512,shared=0.5 (the default)",
            "", "NAME=NUMBER,...",
        ),
        Option("page-size", "tokens of a page", "16", takes=(1, 4096)),
        Option("host-memory", "of the host, for what the device cannot hold", takes=SIZE),
        Option(
            "store", "behind the host's memory, such as file:/var/cache/prefixes or redis://HOST:6379/0", metavar="URL"
        ),
        Option(
            "store-keep", "what is written to the store: all, what was hit twice, or what the host is about to lose",
            "through", choices=("through", "selective", "back"),
        ),
        Option(
            "events", "publish what is cached for routers, such as at tcp://127.0.0.1:5557", metavar="ENDPOINT"
        ),
        Option("events-keys", "with the keys of both sides: only who has them may follow", metavar="FILE"),
    ),
    "prefill apart from decode": (
        Option("prefill", "of servers that compute prompts, such as tcp://127.0.0.1:5600", metavar="ADDRESS,..."),
        Option("as-prefill", "compute prompts for servers that connect there", metavar="ADDRESS"),
        Option("prefill-keys", "with the keys of both sides, for other machines", metavar="FILE"),
        Option("prefill-mover", "moves content past the connection", choices=("nixl",)),
    ),
    "serving": (
        Option("host", "address to listen at", "127.0.0.1"),
        Option("allow-host", "further names of this server, as behind a proxy; *: any", "", "NAME,..."),
        Option("port", "0: any that is free", "8000", takes=(0, 65535)),
        Option("keys", "the keys of tenants, in TOML (default: nobody needs one)", metavar="FILE"),
        Option("max-running", "answers at once", "16", takes=(1, 4096)),
        Option("max-queue", "requests that may wait", "1024", takes=(0, 1 << 20)),
        Option("chunk", "tokens of one step", "512", takes=(1, 1 << 20)),
        Option("speculate", "tokens guessed ahead", "0", takes=(0, 16)),
        Option("max-body", "of a request", "8MiB", takes=SIZE),
        Option("max-bodies", "of all requests that are read at once", "256MiB", takes=SIZE),
        Option("max-answer", "tokens, if a chat does not say how many", "2048", takes=(1, 1 << 20)),
        Option("otlp", "a collector of OpenTelemetry for the span of each request", metavar="URL"),
        Option("trace", "write what the engine does, for ui.perfetto.dev", metavar="FILE"),
        Option("trace-size", "the trace ends there", "1GiB", takes=SIZE),
        Option("record", "write what the cache is asked, without text, for `prefixloom replay`", metavar="FILE"),
        Option("record-size", "the recording ends there", "1GiB", takes=SIZE),
        Option("timeout", "seconds of an answer", "600", "S", (1, 1 << 20)),
        Option("drain", "seconds that the end waits for answers and store", "30", "S", (0, 1 << 20)),
    ),
}  # fmt: skip
"""The options that take a value, by group."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in options:
            option.add_to(group)
    parser.add_argument(
        "--events-in-clear", action="store_true",
        help="publish to whoever reaches the port, which has all prompts' tokens",
    )  # fmt: skip
    parser.add_argument(
        "--no-insight", dest="insight", action="store_false", help="no metrics, no page, and no history of misses"
    )


@attrs.frozen
class ServeSettings:
    """The options, checked and converted: ``numbers``, sizes included, by name.

    ``traffic``  what memory is divided for
    ``prefill``  the addresses of prefill servers; None: prompts are computed here
    """

    args: argparse.Namespace
    numbers: dict[str, int]
    traffic: Traffic
    prefill: list[str] | None = None


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """Check and convert the options. ``InputError``: one of them is wrong, or two do not fit."""
    numbers = {}
    for option in (each for options in OPTIONS.values() for each in options):
        name = option.name.replace("-", "_")
        text = getattr(args, name)
        if option.takes is not None and text is not None:
            numbers[name] = option.number(text)
    if args.store is not None and args.host_memory is None:
        raise InputError("--store stands behind the host's memory: give --host-memory as well, such as 8GiB")
    check_events(args)
    traffic = Traffic.parse(args.traffic, running=numbers["max_running"], chunk=numbers["chunk"])
    return ServeSettings(args, numbers, traffic, prefill_addresses(args))


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
    """Return the addresses of prefill servers, checked with the keys for them. None: prompts are computed here."""
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
    """Serve until a signal comes. Return 1 if the engine failed."""
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


@attrs.define
class Assembled:
    """A server that is ready to be run.

    ``about``      its model, in words
    ``publisher``  of its events; None: of none
    ``prefill_at`` where servers find it whose prompts it computes; "": it computes none
    ``set_peers``  tells it the addresses of prefill servers, in the engine's thread
    """

    about: str
    app: Any = None
    server: Any = None
    publisher: Any = None
    prefill_at: str = ""
    set_peers: Callable[[list[str]], None] = lambda addresses: None


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
    from ..serving.engine import Engine
    from ..tracing.trace import Trace
    from .access import Access, read_tenants
    from .admin import Admin, AttachedStore
    from .app import Limits, Server, make_app
    from .worker import EngineWorker

    args, numbers = settings.args, settings.numbers
    access = Access() if args.keys is None else read_tenants(Path(args.keys))
    observers: list[Observer] = []
    closing: list[Callable[[], None]] = []
    if args.trace is not None:
        trace = Trace(args.trace, size=numbers["trace_size"])
        observers.append(trace)
        closing.append(trace.close)
    model, about = model_of(args)
    made = Assembled(about)
    identity = getattr(model, "identity", None)
    tier = None
    if args.host_memory is not None:
        tier = make_component("hicache", "host", memory=numbers["host_memory"], identity=identity, keep=args.store_keep)
    store = AttachedStore(tier)
    make_publisher = None if args.events is None else observer_named("events")

    def make() -> DrivenEngine:
        cache = compose(
            model.config, plugins=[] if tier is None else [tier], memory=numbers["memory"],
            page_size=numbers["page_size"], traffic=settings.traffic, device=args.device, policy="priority",
            shares=access.cache_shares, max_rewind=numbers["speculate"],
        )  # fmt: skip
        if args.store is not None:
            store.attach(args.store)
        if make_publisher is not None:
            made.publisher = make_publisher(cache, args.events, keys=args.events_keys, in_clear=args.events_in_clear)
            observers.append(Polled(made.publisher.poll))
            closing.append(made.publisher.close)
        if args.record is not None:
            from prefixloom.lab import record

            cache = recorded = record(cache, args.record, size=numbers["record_size"])
            closing.append(recorded.finish)
        engine = Engine(
            model, cache, chunk=numbers["chunk"], max_running=numbers["max_running"], policy="priority",
            speculate=numbers["speculate"], observers=observers, shares=access.shares,
        )  # fmt: skip
        try:
            return _with_peers(engine, settings, made, closing)
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
        numbers["max_body"], numbers["max_bodies"], seconds=numbers["timeout"], answer=numbers["max_answer"],
        drain_seconds=numbers["drain"], context=numbers.get("context", 0),
    )  # fmt: skip
    name = name_of(args)
    made.server = Server(worker, texts, access, limits, name, f"fp_{identity.digest[:12] if identity else 'unknown'}")
    routes = Admin(made.server, store).routes()
    if args.insight:
        from .insight import Insight

        routes += Insight(made.server).routes()
    made.app = make_app(made.server, routes, hosts_of(args))
    if args.otlp is not None:
        from .telemetry import Telemetry, batches_to

        made.app = Telemetry(worker, name, [batches_to(args.otlp)]).around(made.app)
    return made


def _with_peers(
    engine: Engine, settings: ServeSettings, made: Assembled, closing: list[Callable[[], None]]
) -> DrivenEngine:
    """Return the engine with the processes that compute for it, or for which it computes."""
    args = settings.args
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
        made.set_peers = decode.set_peers
        return decode
    prefill = PrefillServer(engine, args.as_prefill, keys=args.prefill_keys, mover=mover)
    made.prefill_at = prefill.address
    return prefill


def hosts_of(args: argparse.Namespace, bound: str = "") -> Hosts:
    """Return the names of the server. ``bound``: where it listens, if its options do not say so."""
    from .access import Hosts

    more = frozenset(each.strip().lower() for each in args.allow_host.split(",") if each.strip())
    return Hosts(bound or args.host, more)


def name_of(args: argparse.Namespace) -> str:
    """Return the name of the model, as clients call it."""
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
    """Return which other servers it works with, in words."""
    if settings.prefill is not None:
        return [f"prompts are computed at {', '.join(settings.prefill) or 'addresses that come'}, or else here"]
    return [f"computes prompts for servers with --prefill {made.prefill_at}"] if made.prefill_at else []


def _allow_many_files() -> None:
    """Ask for more open files, one for each connection: a process often may have 1024 only."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def observer_named(name: str) -> Callable[..., Any]:
    """Return the maker of observers of a cache, from the package that is installed for this name."""
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
    """Return the model, and a description."""
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
    """Return the maker of a model's tokenizer. ``images``: with the processor of its images, if it takes any."""
    if args.model is None:
        from ..threeway.text import ByteTokenizer

        return ByteTokenizer
    from ..hf.text import load_tokenizer

    return functools.partial(load_tokenizer, args.model, images=images)
