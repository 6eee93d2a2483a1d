"""Two processes, and what each of them leaves for the test that launched them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


ROOT = Path(__file__).parents[2]
MODES = ("joint", "separate")
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def launch(folder: Path, module: str, *launcher: str, **environment: str) -> Path:
    """Run `python -m MODULE FOLDER`, which has to succeed."""
    command = [sys.executable, *launcher, "-m", module, str(folder)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-6000:]
    return folder


def keep(folder: Path, name: str, state: dict[str, Tensor], **facts: Any) -> None:
    path = folder / f"{name}-{os.environ['RANK']}"
    save_file({key: value.contiguous() for key, value in state.items()}, f"{path}.safetensors")
    Path(f"{path}.json").write_text(json.dumps(facts))


def kept(folder: Path, name: str, rank: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{name}-{rank}.safetensors")


def facts(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


def assert_same(folder: Path, *names: str) -> None:
    """All processes and all runs of these names ended with the same, to the bit."""
    expected = kept(folder, names[0])
    for name in names:
        for rank in (0, 1):
            found = kept(folder, name, rank)
            assert found.keys() == expected.keys()
            assert [key for key in found if not torch.equal(found[key], expected[key])] == []
