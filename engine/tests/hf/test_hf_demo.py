"""``prefixloom demo --model PATH``: the folder of a Hugging Face model in place of the built-in one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import transformers

from prefixloom import compose
from prefixloom.cli import main
from prefixloom_engine.demo import command, comparison
from tests.support.hf_models import REGISTRY, model_of
from tests.support.traces import read_trace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found as in an installation, also where only the source is on the path."""

    def composed(*args: object, **options: object) -> object:
        return compose(*args, registry=REGISTRY, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison, "compose", composed)
    monkeypatch.setattr("prefixloom.cli._module", lambda name: command)


def test_a_model_on_disk_is_served_judged_and_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("qwen3_5_text").save_pretrained(tmp_path / "model")
    capsys.readouterr()
    options = ["--model", str(tmp_path / "model"), "--dtype", "float64", "--trace", str(tmp_path / "trace")]
    assert main(["demo", *options, "--conversations", "2", "--turns", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "no bar of transformers', since this is no terminal"
    told = json.loads(out)
    assert told["verdict"]["passed"] is True
    assert told["verdict"]["pages"] > 10
    assert told["hit_rate"] > 0.5
    assert told["verdict"]["moved"]["full"] is None or told["verdict"]["moved"]["full"] > 1e-3
    spans = read_trace(tmp_path / "trace").spans("request")
    assert len(spans) >= 4 and any(int(span.values["hit"]) > 0 for span in spans)


@pytest.mark.filterwarnings("ignore:.*token_id must be.*")
def test_a_model_that_cannot_take_so_long_a_prompt_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Learned positions end somewhere, and a request that would go past them is refused before it runs."""
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=600, bos_token_id=0, eos_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "short")
    capsys.readouterr()
    assert main(["demo", "--model", str(tmp_path / "short"), "--conversations", "1", "--turns", "4", "--json"]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"prefixloom: a request may come to \d+ tokens, which the model refuses: GPT2LMHeadModel has learned 600 "
        r"positions, not \d+",
        last,
    )
