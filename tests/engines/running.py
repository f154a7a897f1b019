"""Runs one engine in a child process with given options, and reads what it wrote down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.environment import RELEASES, ROOT, build
from tests.engines.environment import variables as variables_of
from tests.engines.models import MODELS
from tests.engines.traffic import Traffic, sizes
from tests.engines.worlds import ADAPTERS, WAYS

LONGEST_RUN = 3600.0


class Failed(Exception):
    """A child ended with an error. The text has the end of its log."""


class Bench:
    """One engine's environment, a folder for models and logs, and the options that all runs share."""

    def __init__(self, engine: str, folder: Path, version: str | None = None, environment: Path | None = None) -> None:
        """Make the environment in ``folder``, with this checkout installed, or take one that stands and has it."""
        self.engine = engine
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if environment is None:
            made = folder / "environments" / f"{engine}-{version or RELEASES[engine].versions[0]}"
            self.python = build(engine, made, version, project=ROOT)
        else:
            self.python = build(engine, environment, version)

    def model(self, name: str) -> Path:
        """Return the checkpoint of a tiny model, made once."""
        assert name in MODELS, f"no such model: {name}. There are {', '.join(MODELS)}"
        return self._made("models", name)

    def companion(self, name: str) -> Path:
        """Return a draft model or an adapter for the tiny Llama, made once."""
        return self._made("companions", name)

    def _made(self, module: str, name: str) -> Path:
        folder = self.folder / module / name
        if not any(folder.glob("*config.json")):
            command = [str(self.python), "-m", f"tests.engines.{module}", name, str(folder)]
            subprocess.run(command, check=True, cwd=ROOT, env=self.variables({}), stdin=subprocess.DEVNULL)
        return folder

    def run(
        self, told: Mapping[str, Any], label: str, settings: Mapping[str, str] | None = None,
        stop_after: Callable[[int], bool] | None = None, child_module: str | None = None,
        plugins: Sequence[str] = (),
    ) -> dict[str, Any] | None:  # fmt: skip
        """Run one child to its end, or kill it once ``stop_after`` says so of the number of answers.

        ``plugins``: functions of ``plugins_ENGINE`` that the engine runs in each of its processes.
        """
        files = self.folder / "runs" / label.replace(" ", "-")
        files.mkdir(parents=True, exist_ok=True)
        result, progress, log = files / "result.json", files / "progress", files / "log"
        for old in (result, progress):
            old.unlink(missing_ok=True)
        (files / "told.json").write_text(json.dumps({**told, "result": str(result), "progress": str(progress)}))
        own = dict(settings or {})
        plugins = ["repair", *plugins, *(each for each in ("spoil", "blind") if told[each])]
        if told["spoil"]:
            own["SPOIL"] = told["mode"]
        if told["draft"]:
            plugins.append("drafts")
            own["DRAFTS"] = str(files / "drafts")
            (files / "drafts").unlink(missing_ok=True)
        own["PYTHONPATH"] = str(self._entries(files, plugins))
        module = f"tests.engines.{child_module or f'serve_{self.engine}'}"
        with log.open("w") as output:
            child = subprocess.Popen(
                [str(self.python), "-m", module, str(files / "told.json")],
                cwd=ROOT, env=self.variables(own), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            try:
                ended = self._watch(child, progress, stop_after)
            finally:
                self._end(child)
        if not ended:
            return None
        if child.returncode or not result.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise Failed(f"{self.engine}, {label}: ended with {child.returncode}. {log} ends with\n{tail}")
        return dict(json.loads(result.read_text()))

    def _watch(self, child: subprocess.Popen[bytes], progress: Path, stop_after: Callable[[int], bool] | None) -> bool:
        """Wait for the child's end; False if it is to be killed."""
        deadline = time.monotonic() + LONGEST_RUN
        while child.poll() is None:
            if stop_after and progress.exists():
                lines = progress.read_text().split()
                if lines and stop_after(int(lines[-1])):
                    return False
            if time.monotonic() > deadline:
                raise Failed(f"{self.engine} did not end within {LONGEST_RUN:.0f} s")
            time.sleep(0.1)
        return True

    @staticmethod
    def _end(child: subprocess.Popen[bytes]) -> None:
        """Kill the child and all that it started: its process group has nobody else."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def test(self, tests: Path, files: Sequence[str], inside: bool, settings: Mapping[str, str]) -> Path:
        """Run these files of the engine's own tests, with our cache in place or without; return pytest's report."""
        report = self.folder / "theirs" / f"{self.engine}-{'inside' if inside else 'plain'}.xml"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        existing = [str(tests / each) for each in files if (tests / each).exists()]
        command = [str(self.python), "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider",
                   "--continue-on-collection-errors", "-p", f"inside_{self.engine}",
                   f"--junitxml={report}", *existing]  # fmt: skip
        here = str(Path(__file__).parent)  # not as tests.engines: the engine has a package 'tests' too
        variables = self.variables({"OURS_INSIDE": str(int(inside)), "PYTHONPATH": here, **settings})
        log = report.with_suffix(".log")
        with log.open("w") as output:
            subprocess.run(
                command, cwd=tests.parent, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                timeout=3000,
            )  # fmt: skip
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report; see {log}")
        return report

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        found = variables_of(self.engine)
        paths = [more.get("PYTHONPATH"), str(ROOT), found.get("PYTHONPATH")]
        return {**found, **more, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def _entries(self, files: Path, plugins: Sequence[str]) -> Path:
        """Return a folder with entry points for the engine's processes."""
        info = files / "entry" / "engine_entries-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-entries\nVersion: 0\n")
        points = [f"{name} = tests.engines.plugins_{self.engine}:{name}\n" for name in plugins]
        (info / "entry_points.txt").write_text(f"[{PLUGINS[self.engine]}]\n" + "".join(points))
        return files / "entry"


PLUGINS = {"sglang": "sglang.srt.plugins", "vllm": "vllm.general_plugins"}
"""The group of entry points that each engine runs in all of its processes."""
GROUPS = {"llama": 1, "gemma3": 3, "cohere2": 4, "gpt_oss": 2, "qwen3_next": 4, "qwen3_next_slow": 4, "qwen3_5": 4,
          "mamba2": 1, "bamba": 4, "falcon_h1": 2, "jamba": 4, "granite_hybrid": 4, "lfm2": 3}  # fmt: skip
"""How many groups vLLM makes of a model's layers: a block holds content of one group."""
BFLOAT16 = ("qwen3_next", "qwen3_next_slow", "qwen3_5")
"""Models whose states vLLM's kernels for a CPU take in this type alone. All others run in float32."""
SPARE = 64
"""Tokens that a pool has at least beyond the longest request."""


def scene(
    bench: Bench, model: str, requests: int, seed: int, fraction: float, page: int, overlap: bool, dtype: str | None,
    apart: str = "none", draft: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return what all runs of one comparison share: model, traffic, and pools for a fraction of what the traffic needs.

    ``apart``: what keeps requests apart, of ``worlds.WAYS``. ``draft``: whether a draft model runs beside the model.
    """
    traffic = {"requests": requests, "seed": seed, "wave": 8, "worlds": WAYS[apart]}
    needed, longest = sizes(Traffic(requests, seed, 8, WAYS[apart]))
    named = [name for name in ADAPTERS if name] if apart == "adapters" else []
    tokens = max(int(needed * fraction), longest + SPARE)
    return {
        "model": str(bench.model(model)), "traffic": traffic, "needed": needed, "tokens": tokens, "page": page,
        "longest": longest + SPARE, "blocks": -(-tokens // page) * GROUPS[model], "chunk": 256, "overlap": overlap,
        "dtype": dtype or ("bfloat16" if model in BFLOAT16 else "float32"), "extra": {}, "connector": {},
        "spoil": False, "blind": False, "draft": str(bench.companion("draft")) if draft else None,
        "adapters": {name: str(bench.companion(f"adapter-{name}")) for name in named},
    }  # fmt: skip
