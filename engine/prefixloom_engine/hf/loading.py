"""``load``: a model from a folder on disk. Every failure is reported in one sentence.

Nothing is downloaded, no code in the folder is run, and no missing weight is replaced by a random one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from prefixloom import CompositionError

from .images import FAMILIES
from .model import HFModel
from .refusals import refuse

MOST_NAMES = 3
"""How many names of weights a message shows."""
MOST_CHARACTERS = 300
"""How many characters of another library's message are shown."""


def load(path: str | os.PathLike[str], *, dtype: str = "auto", device: str = "cpu") -> HFModel:
    """Load the causal language model, with or without images, in a folder that ``save_pretrained`` wrote, or that was
    downloaded.

    ``dtype``   the dtype of its weights, such as "float32" or "bfloat16"; "auto": the one in its config
    ``device``  the device of its weights
    """
    folder = Path(path)
    where = f"the model in {os.fspath(path)!r}"
    config = read_config(folder, where)
    refuse(config)
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise CompositionError(f"dtype={dtype!r} is none of torch's; say 'auto', 'float32', 'bfloat16' or 'float16'")
    kind = AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM
    try:
        with _progress_bars_on_terminals_only():
            model, loading_info = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # ``_check_complete`` refuses them by name
            )
    except Exception as error:  # of a dozen types, from several libraries
        raise CompositionError(f"{where} cannot be loaded: {sentence(error)}") from error
    _check_complete(loading_info, where)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise CompositionError(f"{where} cannot be put on device {device!r}: {sentence(error)}") from error
    return HFModel(model.eval())


@contextmanager
def _progress_bars_on_terminals_only() -> Iterator[None]:
    """Leave out transformers' progress bars in pipes and files, into which it draws them as well."""
    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def read_config(folder: Path, where: str) -> Any:
    """Read the config of a model. ``where``: what an error calls the model."""
    if folder.is_file():
        raise CompositionError(f"{where} is a file: pass the folder of a downloaded model")
    if not folder.is_dir():
        raise CompositionError(f"{where} is not there: nothing is downloaded, so pass the folder of a downloaded model")
    try:
        raw = json.loads(folder.joinpath("config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompositionError(f"{where} has no config.json: it is not the folder of a model") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CompositionError(f"{where} has a config.json that cannot be read: {error}") from error
    if not isinstance(raw, dict) or not raw.get("model_type"):
        raise CompositionError(f"{where} has a config.json without a model_type: it does not say what it is")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a dozen types, from several libraries
        raise CompositionError(
            f"{where} is of model type {raw['model_type']!r}, and transformers cannot read its config: "
            f"{sentence(error)}"
        ) from error


def _check_complete(loading_info: Any, where: str) -> None:
    """Refuse missing and mismatched weights: transformers fills them with random numbers and only warns."""
    for what, key in (("lacks weights", "missing_keys"), ("has weights of other shapes", "mismatched_keys")):
        names = sorted(name if isinstance(name, str) else name[0] for name in loading_info.get(key) or ())
        if names:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            raise CompositionError(f"{where} {what}: {', '.join(names[:MOST_NAMES])}{more}. Download or save it again")


def sentence(error: BaseException) -> str:
    """Return the message of an error of another library, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
