"""``prefixloom demo``: conversations through the built-in model, and whether the cache changed anything.

Every turn is answered twice by the same engine: with a cache that is too small for all of it, over a tier in the
host's memory that takes what has to go, and with one that never hits. What is printed is measured here and now, on this
machine.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from prefixloom import CompositionError, InputError, PrefixloomError, TierManifest, compose

from . import interrupts
from .conversations import Conversations

if TYPE_CHECKING:
    from prefixloom import Cache

    from .engine import Engine
    from .model import Model
    from .requests import Answer
    from .telling import Progress
    from .verdict import Verdict

REPLY = 16
"""Tokens of an answer."""
LIMITS = {
    "conversations": (1, 1000),
    "turns": (1, 100),
    "seed": (0, 2**31 - 1),
    "capacity": (1, 1 << 20),
    "host": (0, 1 << 20),
    "speculate": (0, 16),
}
STATES = 6
"""States that the pool has for each running request beside those for the tree."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Numbers are read by ``settings_of``: argparse would tell the whole usage with every mistake.
    parser.add_argument("--conversations", default="8", metavar="N", help="how many there are (default: 8)")
    parser.add_argument("--turns", default="4", metavar="N", help="turns of each conversation (default: 4)")
    parser.add_argument("--size", help="of the built-in model: tiny, small, medium, large (default: small)")
    parser.add_argument(
        "--model", metavar="PATH", help="the folder of a Hugging Face model, in place of the built-in one"
    )
    parser.add_argument("--dtype", help="float32 or float64 (default: float64; of --model: float32)")
    parser.add_argument("--seed", default="0", metavar="N", help="of all random tokens and weights (default: 0)")
    parser.add_argument("--speculate", default="0", metavar="N", help="tokens guessed ahead (default: 0)")
    parser.add_argument("--capacity", metavar="N", help="tokens that the device holds (default: 40%% of all)")
    parser.add_argument("--host", metavar="N", help="tokens that the host holds for it, 0: no tier (default: all)")
    parser.add_argument("--report", metavar="FILE", help="write a page with pictures, in one HTML file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


@attrs.frozen
class Settings:
    conversations: int
    turns: int
    seed: int
    speculate: int
    capacity: int | None
    host: int | None
    size: str
    dtype: str
    model: Path | None
    report: Path | None


@attrs.define
class Turn:
    """One prompt and its answer. ``restored_tokens``: of those that hit, what came back from the host.

    Seconds are those to the first token.
    """

    conversation: int
    prompt_tokens: int
    hit_tokens: int
    restored_tokens: int
    seconds_with: float
    seconds_without: float
    ended_by: str


@attrs.define
class Round:
    """One turn of every conversation. ``evicted``: pages and states, by component."""

    number: int
    turns: list[Turn] = attrs.field(factory=list)
    evicted: dict[str, int] = attrs.field(factory=dict)

    def total(self, field: str) -> float:
        return float(sum(getattr(turn, field) for turn in self.turns))

    @property
    def hit_rate(self) -> float:
        return self.total("hit_tokens") / self.total("prompt_tokens")

    @property
    def faster(self) -> float:
        return self.total("seconds_without") / self.total("seconds_with")


def run(args: argparse.Namespace) -> int:
    """Run the conversations and print what came of it. 1 if the verdict is bad."""
    settings = settings_of(args)
    with warnings.catch_warnings():  # torch warns where numpy is missing, and nothing here needs it
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        with interrupts.kept():
            import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that times compare, whoever else is busy on this machine
    try:
        return _converse(settings, args.json)
    finally:
        torch.set_num_threads(threads)


def settings_of(args: argparse.Namespace) -> Settings:
    found: dict[str, int | None] = {"capacity": None, "host": None}
    for name, (low, high) in LIMITS.items():
        text = getattr(args, name)
        option = "--" + name.replace("_", "-")
        if text is not None:
            try:
                value = int(text)
            except ValueError:
                raise InputError(f"{option} takes a whole number, got {text!r}") from None
            if not low <= value <= high:
                raise InputError(f"{option} must be from {low} to {high}, got {value}")
            found[name] = value
    report = None if args.report is None else Path(args.report)
    if report is not None and not report.absolute().parent.is_dir():
        raise InputError(f"--report {args.report}: there is no folder {str(report.absolute().parent)!r}")
    if report is not None and report.is_dir():
        raise InputError(f"--report takes the name of a file, and {str(report.absolute())!r} is a folder")
    model = None if args.model is None else Path(args.model)
    dtype = args.dtype or ("float64" if model is None else "float32")
    if dtype not in ("float32", "float64"):
        raise InputError(f"--dtype must be float32 or float64, got {dtype!r}: rounding to 16 bits hides what is wrong")
    if model is not None and args.size is not None:
        raise InputError("--size is of the built-in model, and --model says which one to take instead: give one")
    return Settings(**found, size=args.size or "small", dtype=dtype, model=model, report=report)  # type: ignore[arg-type]


def _converse(settings: Settings, as_json: bool) -> int:
    from . import telling

    with interrupts.kept():
        model, about = _model(settings)
    talk = Conversations(settings.conversations, settings.turns, REPLY, model.vocabulary, settings.seed)
    progress = telling.Progress(quiet=as_json)
    with Demo(settings, model, about, talk, progress) as demo:
        if not as_json:
            print(telling.introduction(settings, demo))
            print(telling.header(demo), flush=True)
        for turn in range(settings.turns):
            told = demo.round(turn)
            if not as_json:
                print(telling.row(demo, told), flush=True)
        verdict = demo.judge()
    print(telling.as_json(settings, demo, verdict) if as_json else telling.closing(demo, verdict))
    if settings.report is not None:
        from .report import page

        try:
            settings.report.write_text(page(settings, demo, verdict), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--report {settings.report} cannot be written: {error.strerror}") from error
        if not as_json:
            print(f"report:         {settings.report}")
    return 0 if verdict.passed else 1


def _model(settings: Settings) -> tuple[Model, str]:
    """The model, and what it is in words."""
    from .threeway import ThreeWay

    if settings.model is None:
        built_in = ThreeWay(settings.size, dtype=settings.dtype, seed=settings.seed)
        kinds = ", ".join(dict.fromkeys(kind.replace("_", " ") for kind in built_in.sizes.layers))
        return built_in, f"{built_in.parameters / 1e6:.1f} million parameters, random; {kinds}"
    from .hf import load

    loaded = load(settings.model, dtype=settings.dtype)
    count = sum(each.numel() for each in loaded.model.parameters())
    return loaded, f"{type(loaded.model).__name__} in {settings.model}, {count / 1e6:.1f} million parameters"


def capacity_of(settings: Settings, talk: Conversations) -> int:
    """Tokens of each pool: less than all that is said, so that something must go, and room for the longest prompt."""
    least = -(-(talk.longest + REPLY) // 64) * 64
    if settings.capacity is None:
        return max(least, talk.total * 4 // 10)
    if settings.capacity < least:
        turns = f"{settings.turns} turn{'s' if settings.turns > 1 else ''}"
        raise InputError(
            f"--capacity {settings.capacity} is too small: one conversation of {turns} may need {least} tokens. Give "
            f"at least so many, or fewer --turns"
        )
    return settings.capacity


def pools(model: Model, tokens: int, ahead: int) -> dict[str, int]:
    """What each component of the model's gets: so many tokens, or as many states as go with them."""
    looked_at: Cache = compose(model.config, capacity=tokens, device="meta", max_rewind=ahead)
    states = STATES + ahead + tokens // 128
    return {part.name: tokens if part.page_tokens else states for part in looked_at.composition.parts}


@attrs.frozen(eq=False)
class Below:
    """What the device has no room for rests in the host's memory: a tier is a component with such a manifest.

    ``HostTier`` of prefixloom_hicache is the one for use, with a store behind it; an engine imports no plugin.
    """

    manifest: TierManifest
    name: str = "host"


class Demo:
    """Two engines over one model: one whose cache may hit, and one that answers everything cold."""

    def __init__(self, settings: Settings, model: Model, about: str, talk: Conversations, progress: Progress) -> None:
        from .engine import Engine
        from .verdict import OTHERS, TOLERANCE, Ledger, Verdict

        self.about, self.talk, self.progress, self.folder = about, talk, progress, settings.model
        self.rounds: list[Round] = []
        ahead = settings.speculate
        whole, alone = capacity_of(settings, talk), talk.longest + 4 * 64
        host = talk.total if settings.host is None else settings.host
        tier = [Below(TierManifest(capacity=pools(model, host, ahead), write="back"))] if host else []
        self.cache: Cache = compose(model.config, plugins=tier, capacity=pools(model, whole, ahead), max_rewind=ahead)
        cold: Cache = compose(model.config, capacity=pools(model, alone, 0))
        self.engine = Engine(model, self.cache, speculate=ahead)
        self.cold = Engine(model, cold)
        self.verdict: Verdict = Verdict(TOLERANCE[settings.dtype] if settings.model is None else OTHERS)
        self._ledger = Ledger(self.cache, self.verdict)
        self._asked = 0
        self._answer(self.cold, [1] * 64, "warm-up")  # so that the first turn does not pay for torch's start

    def round(self, turn: int) -> Round:
        """One turn of every conversation."""
        told = Round(turn + 1)
        before = self._evicted()
        order = self.talk.order()
        for done, number in enumerate(order):
            self.progress.show(f"turn {turn + 1} of {self.talk.turns}, conversation {done + 1} of {len(order)}")
            prompt = self.talk.ask(number, turn)
            answer, one = self._turn(number, prompt)
            self.talk.answered(number, answer.tokens)
            told.turns.append(one)
        self.progress.clear()
        told.evicted = {name: count - before[name] for name, count in self._evicted().items()}
        self.rounds.append(told)
        return told

    def _turn(self, number: int, prompt: list[int]) -> tuple[Answer, Turn]:
        plan = self.cache.match(prompt, leave=1)
        limited, here = plan.limited_by, plan.restorable == plan.ready
        if here:
            self._ledger.compare(prompt)
        answer, seconds = self._answer(self.engine, prompt, "")
        if not here:  # what came back from the host can only be looked at now
            self._ledger.compare([*prompt[: answer.hit], 0])
        self._ledger.leave([*prompt, *answer.tokens])
        self._asked += 1
        without, cold_seconds = self._answer(self.cold, prompt, f"cold {self._asked}")
        self.verdict.see(answer, without)
        return answer, Turn(
            number, len(prompt), answer.hit, answer.restored, seconds, cold_seconds, limited or "the text"
        )

    def _answer(self, engine: Engine, prompt: list[int], namespace: str) -> tuple[Answer, float]:
        from .requests import Request

        started = time.perf_counter()
        stream = engine.stream(Request(prompt, REPLY, stops=(), namespace=namespace, logprobs=True))
        try:
            next(stream)
            seconds = time.perf_counter() - started
            for _ in stream:
                pass
        except Exception as error:
            if self.folder is None or isinstance(error, PrefixloomError):
                raise
            raise CompositionError(self._failed(error, len(prompt))) from error
        if namespace:
            engine.drain()
            engine.cache.drop_namespace(namespace)
        return stream.answer, seconds

    def _failed(self, error: Exception, length: int) -> str:
        """What to say of somebody's model that raises: most often it has no embedding for so late a position."""
        most = getattr(self.engine.model.config, "max_position_embeddings", None)
        told = f"the model in {str(self.folder)!r} fails with {type(error).__name__} ({error})"
        if isinstance(most, int) and length + REPLY > most:
            return f"{told}: a prompt of {length} tokens and its answer, and its config says at most {most} positions"
        return f"{told} at a prompt of {length} tokens"

    def judge(self) -> Verdict:
        """What all comparisons come to. Nobody runs any more, so that nobody may hold a page."""
        from .verdict import control

        self.progress.show("the control: the same again with memory lost")
        self.verdict.moved = control(self.engine, self.talk.ask(0, self.talk.turns)[: self.talk.longest])
        self.progress.clear()
        self.engine.close()
        components = self.cache.stats().components.values()
        self.verdict.held = sum(component.running + component.leased for component in components)
        return self.verdict

    @property
    def total(self) -> Round:
        """All rounds in one."""
        total = Round(0, [turn for told in self.rounds for turn in told.turns])
        for told in self.rounds:
            for name, count in told.evicted.items():
                total.evicted[name] = total.evicted.get(name, 0) + count
        return total

    def _evicted(self) -> dict[str, int]:
        return {name: part.evicted for name, part in self.cache.stats().components.items()}

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.clear()
        self.engine.close()
        self.cold.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
