"""Runs mutants of our own code against the kit's laws and the state machine: a fork for each, of one process.

    python tests/killing.py                  every row of mutants.py, by the killer that it names
    python tests/killing.py --search NAME    what kills the mutants with NAME in their names

The forking process has imported torch and nothing of prefixloom; a child compiles the one changed module in its place.
A mutant is killed if its killer fails on it. What a killer says of the core as it is, is tested elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutants import CORE, MUTANTS, Killer, Mutant

SECONDS = 60
"""A killer that takes longer has not killed."""
LAWS = ("law_every_answer_is_what_the_sets_say",)


def mutated(mutant: Mutant) -> str | None:
    """The changed source; None if the text is no longer there."""
    text = (CORE / mutant.file).read_text()
    return text.replace(mutant.old, mutant.new, 1) if mutant.old in text else None


def take_the_place_of(path: Path, source: str) -> None:
    """From now on the module of this file is the changed one."""
    from importlib.machinery import SourceFileLoader

    honest = SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> Any:
        if Path(self.path) == path:
            return compile(source, str(path), "exec")
        return honest(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def unshrunk() -> None:
    """Whether something is found is asked here, not how short it can be said."""
    from prefixloom.testing import laws_of_machine, outcomes

    laws_of_machine.shrink = lambda arena, ops, limit: list(ops)
    outcomes.shrunk = lambda case, script, *_: list(script)  # type: ignore[assignment]


def killed_by(killer: Killer) -> str:
    """What the killer says of the code in its place; empty if nothing."""
    kind, name, what = killer
    unshrunk()
    try:
        if kind == "composition":
            from property import run

            run(name, "m", int(what), patience=0)
        else:
            from broken import ORIGINALS
            from prefixloom.testing import ComponentCase, check_law, conformance

            make, truth = ORIGINALS[what]
            (law,) = [law for law in conformance.LAWS if conformance.name_of(law) == name]
            check_law(law, ComponentCase(make, truth, what, effort=1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def forked(work: Callable[[], str]) -> str:
    """What ``work`` returns in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            import signal

            signal.alarm(SECONDS)
            try:
                told = work()
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"[:300]
        os.write(write, told.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told


def outcome(mutant: Mutant, killer: Killer) -> str:
    source = mutated(mutant)
    if source is None:
        return ""

    def work() -> str:
        take_the_place_of(CORE / mutant.file, source)
        return killed_by(killer)

    return forked(work)


def candidates() -> Iterator[Killer]:
    from broken_names import ORIGINAL_NAMES, SETUP_NAMES

    for law in (
        "law_every_answer_is_what_the_sets_say",
        "law_a_lease_covers_exactly_what_resuming_needs",
        "law_a_release_undoes_its_own_acquire",
        "law_a_split_changes_nothing_that_a_reader_sees",
    ):
        for name in ORIGINAL_NAMES:
            yield ("law", law, name)
    for ops in (500, 2000):
        for name in SETUP_NAMES:
            yield ("composition", name, str(ops))


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutants of the core against what must kill them.")
    parser.add_argument("--search", help="part of a mutant's name: find what kills it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    assert not any(name == "prefixloom" or name.startswith("prefixloom.") for name in sys.modules)
    start = time.monotonic()
    if options.search is not None:
        for mutant in MUTANTS:
            if options.search in mutant.name:
                found = next(((killer, told) for killer in candidates() if (told := outcome(mutant, killer))), None)
                print(json.dumps([mutant.name, *(found or ["SURVIVED"])]), flush=True)
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        told = list(pool.map(lambda mutant: outcome(mutant, mutant.killer), MUTANTS))
    results = {mutant.name: said for mutant, said in zip(MUTANTS, told, strict=True)}
    if options.json:
        print(json.dumps(results))
    else:
        for mutant in MUTANTS:
            stale = mutated(mutant) is None
            word = "STALE" if stale else "killed" if results[mutant.name] else "SURVIVED"
            print(f"{word:9} {mutant.name}: {results[mutant.name][:200]}")
        print(f"{time.monotonic() - start:.0f} s")
    return 0 if all(told) else 1


if __name__ == "__main__":
    sys.exit(main())
