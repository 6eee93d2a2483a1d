"""A procedure on two processes: both end with the same, and it resumes to the bit. Under FSDP2 it does not
start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_fixastep import FixAStepTrainer
from hf_fixastep.procedures import CurriculumLabeling, Procedure, SafeStudent
from tests.procedures.test_procedures import interrupting, run, template
from tests.short_runs import assert_equal, largest_difference, weights
from tests.slow.test_distributed import Sharded
from tests.slow.test_two_processes import launch
from tests.test_resume import Interrupted


pytestmark = pytest.mark.slow

CASES: dict[str, tuple[Procedure, str]] = {
    "curriculum": (CurriculumLabeling(percent=50), "round-1"),
    "safe": (SafeStudent(iterations=2), "student-1"),
}


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])

    def keep(name: str, trainer: FixAStepTrainer) -> None:
        state = {key: value.contiguous() for key, value in weights(trainer.model).items()}
        save_file(state, folder / f"{name}-{rank}.safetensors")

    for name, (procedure, broken_off) in CASES.items():
        keep(f"{name}-whole", run(procedure, folder / name / "whole"))
        with pytest.raises(Interrupted):
            run(procedure, folder / name / "parts", kind=interrupting(broken_off, 2))
        keep(f"{name}-parts", run(procedure, folder / name / "parts", resume=True))
    refusal = "^A procedure predicts between its trainings, which FSDP2 cannot do"
    with pytest.raises(ValueError, match=refusal):  # last, for there is no way back from FSDP2
        run(procedure, folder / "sharded", kind=Sharded)
    with pytest.raises(ValueError, match=refusal):  # as in a recipe
        template(folder / "sharded", Sharded, procedure="safe_student")
    assert not list((folder / "sharded").iterdir())


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    result = launch("-m", "tests.slow.test_procedures", str(folder), FSDP_VERSION="2")
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_same_model_and_resume_to_the_bit(name: str, launched: Path) -> None:
    whole = load_file(launched / f"{name}-whole-0.safetensors")
    assert_equal(load_file(launched / f"{name}-whole-1.safetensors"), whole)
    for rank in (0, 1):
        assert_equal(load_file(launched / f"{name}-parts-{rank}.safetensors"), whole)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_not_one_that_saw_half(name: str, launched: Path, tmp_path: Path) -> None:
    alone = run(CASES[name][0], tmp_path)
    assert (
        largest_difference(weights(alone.model), load_file(launched / f"{name}-whole-0.safetensors")) > 1e-5
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
