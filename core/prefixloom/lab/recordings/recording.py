"""Recording: what an engine asks of its cache, written to a file while it runs, without any text.

``record`` returns a face of the cache that an engine uses in its place. Each call is made as before, and then written:
one JSON array a line, its first element the verb (``traces.recorded`` has the format). Tokens stand as hashes of whole
pages, each of which covers all that stands before it. The first one follows a secret that is not in the file. So a
recording tells which prompts share what, and no more of them than that.

``rerun`` makes the same calls again, and ``traces`` reads a recording as a trace for other caches. An error of the file
ends the recording, and never a request.
"""

from __future__ import annotations

import binascii
import errno
import gzip
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from ...cache.cache import Cache
from ...cache.match_plan import MatchPlan
from ...cache.sequence import Sequence
from ...compose.registry import default_registry
from ...contract.identity import means
from ...contract.tier_answers import Restored
from ...errors import CapacityError, CompositionError, InputError, ProtocolError
from ...insight.explanation import Explanation
from ...keys.pages import PageChain
from ...keys.tokens import Tokens, namespace_of
from ...operations.match import Extra
from ...operations.state import Match
from ...operations.step import Step
from ...tree.radix import FOREVER
from ..traces.recorded import HASH_BYTES, VERSION, Entry

log = logging.getLogger("prefixloom")


def record(
    cache: Cache,
    path: Path | str,
    *,
    salt: bytes | None = None,
    size: int = 1 << 30,
    clock: Callable[[], float] = time.monotonic,
) -> RecordingCache:
    """Return a face of ``cache`` that writes to ``path`` what it is asked. Use it instead, and ``finish`` it.

    ``salt``: a secret that several recordings share, so that equal prompts have equal hashes in them; else each has its
    own. ``size``: bytes after which the recording ends, before they are compressed. A name that ends in ``.gz`` is
    compressed. Only the file's owner may read it.
    """
    composition = cache.composition
    if composition.lent:
        raise CompositionError("a cache whose slots an engine lends is not recorded: compose it with slots='own'")
    if composition.lookahead >= composition.page:
        raise CompositionError(f"a lookahead of {composition.lookahead} needs pages of more tokens to be recorded")
    if cache.stats().opened:
        raise ProtocolError("a recording begins with a cache that was not used yet")
    salt = secrets.token_bytes(16) if salt is None else salt
    chain = PageChain(composition.page, composition.lookahead, salt)
    writer = EntryWriter(Path(path), chain, clock, size)
    writer.write([
        "recording", VERSION, composition.page, composition.lookahead, composition.name, composition.policy.name,
        {name: [each.capacity, each.page_tokens] for name, each in cache.stats().components.items()},
    ])  # fmt: skip
    return RecordingCache(cache, writer)


ENDS = frozenset({"close", "abort"})


class EntryWriter:
    """Writes entries to a file, until it fails or is closed."""

    def __init__(self, path: Path, chain: PageChain, clock: Callable[[], float], size: int) -> None:
        self.path, self.chain = path, chain
        self.sequences = self.steps = 0
        self.namespaces: set[str] = set()
        """Those that something was opened in."""
        self.failed: OSError | None = None
        self._clock, self._begun, self._left = clock, clock(), size
        try:
            file = open(path, "wb", 1 << 16, opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error
        self._below = file if path.suffix == ".gz" else None
        """What is compressed into: ``GzipFile`` leaves it open."""
        self._file: IO[bytes] | None = gzip.GzipFile("", "wb", 1, file) if self._below else file  # type: ignore[assignment]
        self._encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

    def seconds(self) -> float:
        return round(self._clock() - self._begun, 4)

    def write(self, entry: Entry) -> None:
        if self._file is None:
            return
        try:
            line = self._encode(entry).encode() + b"\n"
            self._left -= len(line)
            if self._left < 0:
                raise OSError(errno.EFBIG, "it has the size that it may have")
            self._file.write(line)
            if entry[0] in ENDS:
                self._file.flush()  # an engine that is killed leaves what it has served
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
                if self._below is not None:
                    self._below.close()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        file, self._file = self._file, None
        for each in (file, self._below):
            if each is not None:
                with suppress(OSError):  # what is left in its buffer cannot be written either
                    each.close()
        if self.failed is None:
            self.failed = error
            log.warning("the recording %s ends here: %s", self.path, error)


class RecordingCache(Cache):
    """A face of a cache that records what it is asked. ``finish`` ends the recording; the cache goes on."""

    def __init__(self, cache: Cache, writer: EntryWriter) -> None:
        super().__init__(cache.core, default_registry().session_plugins)
        self._writer = writer
        self._polls = cache.composition.tier is not None

    @property
    def failed(self) -> OSError | None:
        """What ended the recording before its time."""
        return self._writer.failed

    def finish(self) -> None:
        """Write what is not written yet, and record nothing more. A second call does nothing."""
        self._writer.close()

    def __enter__(self) -> RecordingCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish()

    # ------------------------------------------------------------ sequences
    def open(
        self, tokens: Any, *, namespace: str = "", leave: int = 0, extra: Extra = (), label: str = "",
        priority: int = 0, until: float = FOREVER,
    ) -> Sequence:  # fmt: skip
        planned = tokens.__class__ is MatchPlan
        if planned and (namespace or leave or extra):
            raise InputError("a plan has its namespace, leave and extra already: give them to match")
        plan = tokens if planned else self.match(tokens, namespace=namespace, leave=leave, extra=extra)
        try:
            made = super().open(plan, label=label, priority=priority, until=until)
        except CapacityError:
            self._opened(-1, plan.match_for(self.core), priority, until, True)
            raise
        writer = self._writer
        number = writer.sequences
        writer.sequences += 1
        named = self._opened(number, made.running.match, priority, until, False)
        return RecordingSequence(made, writer, number, named)

    def _opened(self, number: int, match: Match, priority: int, until: float, failed: bool) -> NamedSoFar:
        """Write that a sequence was opened, or could not be."""
        writer = self._writer
        writer.namespaces.add(match.namespace)
        named = NamedSoFar(writer.chain, match.namespace)
        hashes = named.take(match.tokens)
        writer.write([
            "open", number, writer.seconds(), named.namespace, match.count, hashes, match.most, priority,
            None if until == FOREVER else until, match.ready, match.walked, match.limited_by, int(failed),
        ])  # fmt: skip
        return named

    def step(self, sequences: Many[Sequence], role: Literal["target", "draft"] = "target", *, ahead: int = 0) -> Step:
        step = super().step(sequences, role, ahead=ahead)
        numbers = [each.number for each in sequences if isinstance(each, RecordingSequence)]
        return RecordedStep(step, self._writer, numbers, role, ahead)  # type: ignore[return-value]

    def explain(
        self, tokens: Any, *, namespace: str = "", leave: int = 0, extra: Extra = (), closely: bool = True
    ) -> Explanation:
        if isinstance(tokens, RecordingSequence):
            tokens = MatchPlan(self.core, tokens.running_for(self.core).match)
        return super().explain(tokens, namespace=namespace, leave=leave, extra=extra, closely=closely)

    def account(self, opened: Sequence | MatchPlan) -> Explanation:
        told = super().account(opened)
        if isinstance(opened, RecordingSequence):
            findings = [[each.start, each.end, each.reason, each.component] for each in told.findings]
            self._writer.write(["why", opened.number, findings])
        return told

    # ------------------------------------------------------------ room
    def evict(self, need: int | Mapping[str, int], *, unneeded: bool = False) -> dict[str, int]:
        freed = super().evict(need, unneeded=unneeded)
        self._writer.write(["evict", need if isinstance(need, int) else dict(need), int(unneeded), freed])
        return freed

    def expire(self, now: float) -> None:
        super().expire(now)
        self._writer.write(["expire", now])

    def reclaim(self) -> dict[str, int]:
        given = super().reclaim()
        self._writer.write(["reclaim"])
        return given

    def drop_namespace(self, namespace: str) -> int:
        kept = super().drop_namespace(namespace)
        plain, writer = namespace_of(namespace), self._writer
        meant = [hidden(writer.chain, each) for each in writer.namespaces if each == plain or means(plain, each)]
        writer.write(["drop", sorted(meant)])
        return kept

    def flush(self) -> None:
        super().flush()
        self._writer.write(["flush"])

    def poll(self) -> None:
        super().poll()
        if self._polls:
            self._writer.write(["poll"])

    def lease(self, plan: MatchPlan, *, exact: bool = False) -> Any:
        raise ProtocolError("a lease is not recorded: open a sequence, or use the cache itself")


def hidden(chain: PageChain, namespace: str) -> str:
    """Return a namespace without its name. The empty one stays empty."""
    return blake2b(chain.root(namespace), digest_size=HASH_BYTES).hexdigest() if namespace else ""


class NamedSoFar:
    """The whole pages of tokens that one sequence has named.

    A hash in the file is the beginning of a page's digest. Without the rest of it nobody can compute the next page's.
    """

    __slots__ = ("_chain", "_digests", "_root", "namespace")

    def __init__(self, chain: PageChain, namespace: str) -> None:
        self._chain, self._root = chain, chain.root(namespace)
        self._digests: list[bytes] = []
        self.namespace = hidden(chain, namespace)

    @property
    def pages(self) -> int:
        """The number of whole pages."""
        return len(self._digests)

    def completes(self, named: int) -> bool:
        """Return whether so many named tokens complete further pages."""
        return self._chain.whole(named) > self.pages

    def take(self, tokens: Tokens) -> str:
        """Return the hashes of the pages that ``tokens``, which are all that are named, complete, as text."""
        known = self._digests
        fresh = self._chain.pages(tokens, known[-1] if known else self._root, len(known))
        known += fresh
        return binascii.b2a_base64(b"".join(each[:HASH_BYTES] for each in fresh), newline=False).decode()

    def keep(self, named: int) -> None:
        """Forget the pages that are not whole any more, since so many tokens are named now."""
        del self._digests[self._chain.whole(named) :]


class RecordingSequence(Sequence):
    """A sequence whose calls are recorded. ``inner`` is the same sequence, which knows when it was dropped."""

    __slots__ = ("_inner", "_named", "_writer", "number")

    def __init__(self, inner: Sequence, writer: EntryWriter, number: int, named: NamedSoFar) -> None:
        super().__init__(inner.core, inner.running)
        self._inner, self._writer, self._named = inner, writer, named
        self.number = number

    def __del__(self) -> None:
        """Leave it to the inner sequence to report the drop to the cache."""

    @property
    def priority(self) -> int:
        return self.running.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self._inner.priority = priority
        self._writer.write(["priority", self.number, priority])

    @property
    def until(self) -> float:
        return self.running.until

    @until.setter
    def until(self, until: float) -> None:
        self._inner.until = until
        self._writer.write(["until", self.number, None if until == FOREVER else until])

    def restore(self) -> Restored:
        restored = super().restore()
        self._writer.write(["restore", self.number, self.ready])
        return restored

    def grow(self, count: int, *, arriving: bool = False) -> None:
        try:
            super().grow(count, arriving=arriving)
        except CapacityError:
            self._writer.write(["grow", self.number, self.reserved + count, 1, int(arriving)])
            raise
        self._writer.write(["grow", self.number, self.reserved, 0, int(arriving)])

    def append(self, tokens: Any, *, extra: Extra = ()) -> None:
        super().append(tokens, extra=extra)
        first, hashes = self._named.pages, ""
        if self._named.completes(self.named):
            hashes = self._named.take(self.tokens)
        self._writer.write(["append", self.number, self.named, hashes, first])

    def fill(self, stream: Any = None) -> None:
        super().fill(stream)
        self._writer.write(["fill", self.number])

    def commit(self, upto: int | None = None) -> None:
        super().commit(upto)
        self._writer.write(["commit", self.number, self.committed])

    def publish(self, upto: int | None = None) -> int:
        before = self.published
        asked = self.publishable if upto is None else upto
        published = super().publish(upto)
        if published > before:
            self._writer.write(["publish", self.number, asked, published])
        return published

    def rewind(self, count: int) -> None:
        super().rewind(count)
        self._named.keep(self.named)
        self._writer.write(["rewind", self.number, self.reserved, self.named])

    def close(self) -> None:
        was_open = self.open
        super().close()
        if was_open:
            self._writer.write(["close", self.number, self._writer.seconds()])

    def abort(self) -> None:
        was_open = self.open
        super().abort()
        if was_open:
            self._writer.write(["abort", self.number, self._writer.seconds()])


class RecordedStep:
    """A step that is written when its block begins and when it ends. Inside of the block it is the step itself."""

    __slots__ = ("_ahead", "_number", "_numbers", "_role", "_step", "_writer")

    def __init__(self, step: Step, writer: EntryWriter, numbers: list[int], role: str, ahead: int) -> None:
        self._step, self._writer, self._numbers, self._role, self._ahead = step, writer, numbers, role, ahead
        self._number = -1

    def __enter__(self) -> Step:
        entered = self._step.__enter__()
        self._number = self._writer.steps
        self._writer.steps += 1
        self._writer.write(["begin", self._number, self._numbers, self._role, self._ahead])
        return entered

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._step.__exit__(kind, error, tb)
        finally:
            self._writer.write(["end", self._number, int(kind is not None)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
