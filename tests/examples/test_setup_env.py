from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "requirements", "expected"),
    [
        ("2.13.0+cpu", ["filelock"], True),
        ("2.13.0", ["filelock", "optree; extra == 'optree'"], True),
        ("2.13.0", ["filelock", "nvidia-nccl-cu13==2.29.7; platform_system == 'Linux'"], False),
        ("2.13.0", ["cuda-toolkit[cublas]==13.0.3"], False),
    ],
)
def test_cpu_builds_of_torch_are_recognised(setup_env, version, requirements, expected):
    assert setup_env.is_cpu_build({"metadata": {"version": version, "requires_dist": requirements}}) is expected


def test_the_pin_comes_from_the_project_file(setup_env):
    assert setup_env.pinned("torch").startswith("torch==2.")


def test_an_old_python_is_named_with_the_remedy():
    result = subprocess.run(
        ["bash", "scripts/setup_env.sh"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "S2RL_PYTHON": "/nonexistent/python3.9"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "/nonexistent/python3.9" in result.stderr and "S2RL_PYTHON" in result.stderr


BROKEN = """
import torch
torch.library.register_fake("torchvision::nms", lambda dets, scores, iou_threshold: None)
from torchvision import transforms
"""


def imports_torchvision(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(folder), *sys.path]!r}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True)


def fake_torchvision(folder: Path, code: str) -> None:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "transforms.py").write_text("SIZE = 4\n")


USE = "import torchvision; print(torchvision.transforms.SIZE)"


def test_the_hook_repairs_a_torchvision_that_misses_its_operators(tmp_path):
    fake_torchvision(tmp_path, BROKEN)
    assert "torchvision::nms" in imports_torchvision(tmp_path, USE).stderr
    hooked = imports_torchvision(
        tmp_path, f"sys.path.append({str(ROOT / 'scripts')!r}); import torchvision_shim\n{USE}"
    )
    assert hooked.stdout == "4\n", hooked.stderr


def test_the_hook_imports_nothing_by_itself_and_leaves_other_errors_alone(tmp_path):
    fake_torchvision(tmp_path, "raise RuntimeError('out of cheese')")
    hook = f"sys.path.append({str(ROOT / 'scripts')!r}); import torchvision_shim\n"
    lazy = "import importlib.util; importlib.util.find_spec('torchvision'); print('torch' in sys.modules)"
    assert imports_torchvision(tmp_path, hook + lazy).stdout == "False\n"
    assert "out of cheese" in imports_torchvision(tmp_path, hook + USE).stderr
