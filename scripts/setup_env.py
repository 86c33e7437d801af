"""Create .venv, install s2rl with its extras, and repair what does not import.

Runs on the standard library alone, from the repository root, under the Python that .venv shall have (see setup_env.sh).
Does nothing when .venv is up to date with pyproject.toml and this folder.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".s2rl-installed"
EXTRAS = ("cpu", "dev", "quickstart")
SHIM = "s2rl_torchvision_shim"
# PyTorch's own index of CPU builds, for machines where pip would pick a CUDA build with its gigabytes of libraries.
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


class SetupError(Exception):
    """The set-up cannot go on; the message says what the user can do."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fingerprint() -> str:
    """Changes whenever .venv has to be brought up to date."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", *sorted((ROOT / "scripts").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def python_runs() -> bool:
    """Whether .venv has a working interpreter of this version (a moved checkout or a removed Python break it)."""
    if not PYTHON.exists():
        return False
    code = "import pip, sys; print(sys.prefix); print(sys.version)"
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return result.returncode == 0 and result.stdout.strip() == f"{VENV}\n{sys.version}"


def pip(*arguments: str) -> None:
    result = subprocess.run([PYTHON, "-m", "pip", *arguments], cwd=ROOT)
    if result.returncode != 0:
        raise SetupError(
            f"`pip {' '.join(arguments)}` failed (exit code {result.returncode}); its own message is above. "
            "Check the network and the free disk space (about 4 GB), then run the same make command again: "
            "it goes on where it stopped."
        )


def pinned(package: str) -> str:
    """The requirement of `package` in the extra for CPUs, for instance torch==2.13.0."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(requirement for requirement in extras["cpu"] if re.match(rf"{package}\b", requirement))


def is_cpu_build(item: dict[str, Any]) -> bool:
    """Whether an entry of pip's installation report is a torch without CUDA libraries."""
    metadata = item["metadata"]
    libraries = re.compile(r"(nvidia|cuda|triton|pytorch-triton)", re.IGNORECASE)
    return metadata["version"].endswith("+cpu") or not any(map(libraries.match, metadata.get("requires_dist", [])))


def pip_would_pick_cpu_torch(requirement: str) -> bool:
    """Ask pip which torch it would install. A dry run reads the candidate's metadata, not the whole wheel."""
    command = [PYTHON, "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--ignore-installed"]
    try:
        result = subprocess.run([*command, "--report", "-", requirement], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return False
    if result.returncode != 0:
        return False
    return all(map(is_cpu_build, json.loads(result.stdout)["install"]))


def install_torch() -> None:
    requirement = pinned("torch")
    if platform.system() != "Linux" or pip_would_pick_cpu_torch(requirement):
        pip("install", "-qq", requirement)
    else:
        say(f"pip alone would not pick a CPU build of {requirement}: taking it from {CPU_WHEELS}")
        pip("install", "-qq", "--index-url", CPU_WHEELS, requirement, "torchvision")
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    if result.returncode != 0:
        raise SetupError(f"torch was installed but does not import:\n{result.stderr.strip()}")
    version, cuda = result.stdout.split()
    say(f"torch {version}" + ("" if cuda == "None" else f" (built for CUDA {cuda}; larger than needed, but it works)"))


def import_error(module: str) -> str | None:
    """None when `module` is not installed or imports; otherwise the last line of its error."""
    code = f"import importlib.util, torch\nif importlib.util.find_spec({module!r}): import {module}"
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return None if result.returncode == 0 else (result.stderr.strip().splitlines() or ["no message"])[-1]


def site_packages() -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def remove_shim() -> None:
    for suffix in (".py", ".pth"):
        (site_packages() / f"{SHIM}{suffix}").unlink(missing_ok=True)


def repair_torchvision() -> None:
    """Install the start-up hook when torchvision does not import, and only then."""
    remove_shim()
    error = import_error("torchvision")
    if error is None:
        return
    if "torchvision::nms" in error:
        (site_packages() / f"{SHIM}.py").write_bytes((ROOT / "scripts" / "torchvision_shim.py").read_bytes())
        (site_packages() / f"{SHIM}.pth").write_text(f"import {SHIM}\n")
        error = import_error("torchvision")
        if error is None:
            say("torchvision does not find its compiled operators beside this torch: added a hook that declares them")
            return
        remove_shim()
    say(f"torchvision does not import beside this torch ({error}): removing it, only image models need it")
    pip("uninstall", "-qq", "--yes", "torchvision")


def repair_audio() -> None:
    """transformers and vLLM import these when they are installed, and do without them when they are not."""
    for package in ("torchaudio", "torchcodec"):
        if error := import_error(package):
            say(f"{package} does not import beside this torch ({error}): removing it, nothing here needs it")
            pip("uninstall", "-qq", "--yes", package)


def verify() -> None:
    """The imports that everything else rests on."""
    code = "import ray, torch; from transformers import Qwen3ForCausalLM; from vllm import SamplingParams"
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    if result.returncode != 0:
        raise SetupError(f"the installed packages do not import together:\n{result.stderr.strip()[-2000:]}")


def set_up() -> None:
    start = time.monotonic()
    STAMP.unlink(missing_ok=True)
    if not python_runs():
        say(f"creating {VENV} with Python {platform.python_version()}")
        venv.create(VENV, clear=True, with_pip=True)
    # A pip that reads metadata alone in a dry run (24.1) and knows how to install in parallel with downloads.
    pip("install", "-qq", "--upgrade", "pip")
    install_torch()
    say("installing vLLM, transformers, Ray and the tools; one to four minutes")
    pip("install", "-qq", "--editable", f".[{','.join(EXTRAS)}]")
    repair_torchvision()
    repair_audio()
    verify()
    STAMP.write_text(fingerprint())
    say(f"ready in {time.monotonic() - start:.0f} s")


def main() -> int:
    if python_runs() and STAMP.exists() and STAMP.read_text() == fingerprint():
        return 0
    try:
        set_up()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nerror: interrupted; run the same make command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
