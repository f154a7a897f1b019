"""``prefixloom demo``: conversations through a model, and a check of whether the cache changed any answer.

Every turn is answered twice: once with a cache, and once by an engine whose cache never hits. The cache is too small
for all conversations, and a tier in the host's memory below it takes what is evicted. All times are measured in this
run, on this machine.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import TYPE_CHECKING

from prefixloom import InputError

from ..serving.interrupts import reraise_interrupts
from .settings import Settings, add_arguments, read_settings

if TYPE_CHECKING:
    from ..contract.model import Model

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run the conversations and print the results. Return 1 if the cache changed anything, else 0."""
    settings = read_settings(args)
    with warnings.catch_warnings():  # torch warns where numpy is missing, and the demo does not need it
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        with reraise_interrupts():
            import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that other load on the machine disturbs the times less
    try:
        return _run_conversations(settings, args.json)
    finally:
        torch.set_num_threads(threads)


def _run_conversations(settings: Settings, as_json: bool) -> int:
    with reraise_interrupts():
        from . import text
        from .comparison import REPLY, Comparison
        from .conversations import Conversations
        from .progress import Progress

        model, about = _model(settings)
    conversations = Conversations(settings.conversations, settings.turns, REPLY, model.vocabulary, settings.seed)
    progress = Progress(quiet=as_json)
    with Comparison(settings, model, about, conversations, progress) as comparison:
        if not as_json:
            print(text.introduction(settings, comparison))
            print(text.table_head(comparison), flush=True)
        for turn in range(settings.turns):
            round_ = comparison.run_round(turn)
            if not as_json:
                print(text.table_row(comparison, round_), flush=True)
        exactness = comparison.judge()
    print(text.as_json(settings, comparison, exactness) if as_json else text.closing(comparison, exactness))
    if settings.report is not None:
        from .html_report import demo_page

        try:
            settings.report.write_text(demo_page(settings, comparison, exactness), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--report {settings.report} cannot be written: {error.strerror}") from error
        if not as_json:
            print(f"report:         {settings.report}")
    return 0 if exactness.passed else 1


def _model(settings: Settings) -> tuple[Model, str]:
    """Make or load the model; also return a description of it."""
    from ..threeway.model import ThreeWay

    if settings.model is None:
        built_in = ThreeWay(settings.size, dtype=settings.dtype, seed=settings.seed)
        kinds = ", ".join(dict.fromkeys(kind.replace("_", " ") for kind in built_in.sizes.layers))
        return built_in, f"{built_in.parameters / 1e6:.1f} million parameters, random; {kinds}"
    from ..hf import load

    loaded = load(settings.model, dtype=settings.dtype)
    count = sum(each.numel() for each in loaded.model.parameters())
    return loaded, f"{type(loaded.model).__name__} in {settings.model}, {count / 1e6:.1f} million parameters"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
