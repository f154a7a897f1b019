"""Runs the tables of mistakes against their killers, each row in a fork: ``mutants.py`` unless another is asked for.

    python -m tests.support.killing [--tiers | --components] [--only PART] [--every N] [--json]

The forking process has imported torch and nothing of prefixloom; a child compiles the one changed module in its place.
A mutant is killed if its killer fails on it. That no killer fails on the core as it is, is what the other tests say.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from tests.mutation.fragments import Fragment, changed
from tests.support.mutants import CORE, MUTANTS, Killer, Mutant
from tests.support.mutants_tiers import MUTANTS_OF_TIERS
from tests.support.places import file_of_test

SECONDS = 240
"""The processor time of one killer. One that takes longer, or ten times as long by the clock, has not killed."""


def fragment_of(mutant: Mutant) -> Fragment:
    """Return a row of a table as a change of a file of the repository."""
    return Fragment(mutant.name, f"core/prefixloom/{mutant.file}", *mutant[2:5], mutant.at)


def mutated(mutant: Mutant) -> ast.Module | None:
    """Return the changed module; None if the code is no longer there."""
    try:
        return changed(fragment_of(mutant))[0]
    except LookupError:
        return None


def take_the_place_of(path: Path, source: ast.Module) -> None:
    """Let the changed module take the place of this file's from now on."""
    honest = SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> Any:
        return compile(source, str(path), "exec") if Path(self.path) == path else honest(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def killed_by(killer: Killer) -> str:
    """Return what the killer says of the code in its place; empty if nothing."""
    kind, name, what = killer
    if kind == "composition":
        from tests.random.property import run

        run(name, "m", int(what), work=0)
    elif kind == "test":
        import pytest  # its rewriting of asserts would load the core by itself, from the honest file

        files = [str(file_of_test(each)) for each in name.split()]
        options = ["-qx", "--assert=plain", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
        return "the test fails" if pytest.main([*options, *files, "-k", what]) == 1 else ""
    else:
        from prefixloom.testing import ComponentCase, conformance
        from prefixloom.testing.kit import outcomes
        from tests.support.broken import BROKEN, ORIGINALS

        outcomes.shrink = lambda setting, script: list(script)  # whether it is found is asked here, not how short
        made = {broken.mistake: (broken.make, broken.truth) for broken in BROKEN} | ORIGINALS
        (law,) = [law for law in conformance.LAWS if conformance.name_of(law) == name]
        conformance.check_law(law, ComponentCase(*made[what], what, effort=1))
    return ""


def outcome(mutant: Mutant) -> str:
    """Return what its killer says of a mutant, in words; empty if it survives, or is stale."""
    source = mutated(mutant)
    if source is None:
        return ""

    def work() -> str:
        take_the_place_of(CORE / mutant.file, source)
        return killed_by(mutant.killer)

    return forked(work)


SILENT = "law_somebody_says_what_the_layers_do"
"""Where the truth of a broken component is left out on purpose, this law speaks first."""


def convicted(broken: Any) -> str:
    """Return what its law says of a broken component; empty if nothing, or if another law speaks first."""
    from prefixloom.testing.conformance import LAWS, name_of, verdict
    from tests.support.broken import COSTS, FIRST

    laws = {name_of(law): law for law in LAWS}
    for law in (law for name, law in laws.items() if name != SILENT or broken.law == SILENT):
        found = verdict(law, broken.case())
        if found.status in ("broken", "wasteful"):
            break
    if found.law != FIRST.get(broken.mistake, broken.law):
        return ""
    if found.law != broken.law:
        found = verdict(laws[broken.law], broken.case())
    return found.told if found.status == ("wasteful" if broken.mistake in COSTS else "broken") else ""


def forked(work: Callable[[], str]) -> str:
    """Return what ``work`` returns or raises in a child of this process; empty if it takes too long."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # both end the child, without a word
            signal.alarm(10 * SECONDS)
            try:
                told = work()
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode()[:1000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description="Mistakes against what must find them.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tiers", action="store_true", help="mistakes in the host tier, against whole files of tests")
    which.add_argument("--components", action="store_true", help="broken components, against the laws of the kit")
    parser.add_argument("--only", default="", help="part of a row's name")
    parser.add_argument("--every", type=int, default=1, help="each so many-th row only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    start = time.monotonic()
    work: dict[str, Callable[[], str]]
    if options.components:
        from tests.support.broken import BROKEN

        work = {broken.mistake: partial(forked, partial(convicted, broken)) for broken in BROKEN}
    else:
        assert not any(name.partition(".")[0] == "prefixloom" for name in sys.modules)
        table = MUTANTS_OF_TIERS if options.tiers else MUTANTS
        work = {mutant.name: partial(outcome, mutant) for mutant in table}
    chosen = [name for name in work if options.only in name][:: options.every]
    results = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, told in zip(chosen, pool.map(lambda name: work[name](), chosen), strict=True):
            results[name] = told
            if not options.json:
                print(f"{'killed' if told else 'SURVIVED':9} {name}: {' '.join(told.split())[:160]}", flush=True)
    print(json.dumps(results) if options.json else f"{time.monotonic() - start:.0f} s")
    return 0 if options.json or all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
