"""What a launch may ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from torch import nn

from hf_fixastep._compat.distributed import check_launch
from hf_fixastep.losses.fixmatch import FixMatch


LAUNCHES = sorted((Path(__file__).parents[1] / "recipes/accelerate").glob("*.yaml"))
FSDP2 = {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": False}


class WithParameter(FixMatch):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def check(kind: DistributedType, loss: Any = None, **plugin: Any) -> None:
    """Of a launch of this kind, without one."""
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin))
    is_fsdp2 = kind == DistributedType.FSDP and plugin["fsdp_version"] == 2
    accelerator: Any = SimpleNamespace(distributed_type=kind, is_fsdp2=is_fsdp2, state=state)
    check_launch(accelerator, loss or FixMatch(), procedure=None)


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.FSDP])
def test_one_process_data_parallelism_and_fsdp2_can_be_launched(kind: DistributedType) -> None:
    check(kind, **FSDP2)


@pytest.mark.parametrize(
    ("kind", "name"), [(DistributedType.DEEPSPEED, "DEEPSPEED"), (DistributedType.FSDP, "FSDP1")]
)
def test_what_steps_before_the_gate_is_refused(kind: DistributedType, name: str) -> None:
    with pytest.raises(ValueError, match=f"The launch uses {name}, but the gate needs two gradients"):
        check(kind, **{**FSDP2, "fsdp_version": 1})


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "set fsdp_state_dict_type to FULL_STATE_DICT"),
        ({"cpu_ram_efficient_loading": True}, "set fsdp_cpu_ram_efficient_loading to false"),
        ({"loss": WithParameter()}, "WithParameter has parameters of its own"),
    ],
)
def test_what_fsdp2_cannot_do_here_is_refused(change: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check(DistributedType.FSDP, **FSDP2 | change)


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_accelerate_reads_every_launch_file(path: Path) -> None:
    settings: Any = load_config_from_file(str(path))
    assert settings.num_processes >= settings.num_machines
    assert f"--config_file recipes/accelerate/{path.name}" in path.read_text()
