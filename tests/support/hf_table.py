"""The table of every causal model type in docs/hugging-face.md: ``python -m tests.support.hf_table`` writes it anew."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from .hf_outcome import Outcome, outcome_of
from .hf_tiny import MODEL_TYPES
from .places import ROOT

PAGE = ROOT / "docs" / "hugging-face.md"
BEGIN, END = "<!-- model types: begin -->", "<!-- model types: end -->"


def verdict(model_type: str) -> str:
    """What the table says of a model type."""
    try:
        found = outcome_of(model_type)
    except ImportError as error:
        return f"not tried: {one_line(str(error)).partition(' but ')[0]}"
    return told(found)


def told(found: Outcome) -> str:
    """An outcome in words. One that is neither exact nor refused is an error, which no table should hide."""
    if found.refused:
        return f"refused: {one_line(found.refused)}"
    if not found.exact:
        raise AssertionError(f"neither exact nor refused: {found}")
    return "exact" if found.error < 1e-10 else "exact, as float32 in its own code allows"


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(verdicts: Mapping[str, str]) -> str:
    """The text between the markers: the versions, the counts, and a row for each model type."""
    exact = sum(verdict.startswith("exact") for verdict in verdicts.values())
    refused = sum(verdict.startswith("refused") for verdict in verdicts.values())
    rows = "\n".join(f"| {model_type} | {verdict} |" for model_type, verdict in sorted(verdicts.items()))
    return (
        f"With transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}, of "
        f"{len(verdicts)} model types {exact} are exact and {refused} are refused:\n\n"
        f"| type | outcome |\n|---|---|\n{rows}\n"
    )


def between(text: str) -> str:
    """What stands between the markers of a page."""
    return text.partition(BEGIN)[2].partition(END)[0]


def written(page: Path) -> tuple[str, dict[str, str]]:
    """The version of transformers that a page's table is of, and its rows."""
    inside = between(page.read_text(encoding="utf-8"))
    version = re.search(r"With transformers (\S+) and torch", inside)
    rows = re.findall(r"^\| (?!type \|)([\w.-]+) \| (.*) \|$", inside, re.MULTILINE)
    return version[1] if version else "", dict(rows)


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    verdicts = {}
    for model_type in MODEL_TYPES:
        verdicts[model_type] = verdict(model_type)
        print(f"{model_type}: {verdicts[model_type]}", file=sys.stderr)
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(verdicts)}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
