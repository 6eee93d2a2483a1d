"""Two processes that train a head on cached features are one with batches twice as large."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import ViTImageProcessor

from hf_fixastep import FixAStepConfig, FixAStepTrainer
from hf_fixastep.data.features import Features
from hf_fixastep.models.head import FeatureHead, FeatureHeadConfig
from tests.slow.launching import TWO_PROCESSES, keep, kept, launch


pytestmark = pytest.mark.slow

LOSSES = {
    "mean_teacher": {"loss_kwargs": {"student_view": "strong"}, "unlabeled_weight": 20.0},
    "fixmatch": {"loss_kwargs": {"threshold": 0.3}},
}
GATES = ("off", "drop", "per_example")


def trained_head(folder: Path, loss: str, gate: str, batch: int) -> FeatureHead:
    """With one version of each view, so that every draw of an image is the same."""
    values = torch.randn(60, 3, 16, generator=torch.Generator().manual_seed(0)).half()
    labeled = Features.of(values[:20], torch.arange(20) % 4, list("abcd"), weak=1)
    head = FeatureHead(FeatureHeadConfig(size=16, num_labels=4))
    args = FixAStepConfig(
        output_dir=str(folder),
        preset="pretrained",
        loss=loss,
        gate=gate,
        max_steps=30,
        per_device_train_batch_size=batch,
        unlabeled_ratio=2.0,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **LOSSES[loss],
    )
    FixAStepTrainer(
        head,
        args,
        train_dataset=labeled,
        unlabeled_dataset=Features.of(values[20:], weak=1),
        processing_class=ViTImageProcessor(),
    ).train()
    return head


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("two"), "tests.slow.test_heads", *TWO_PROCESSES)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("gate", GATES)
def test_two_processes_train_the_head_of_one(loss: str, gate: str, two: Path, tmp_path: Path) -> None:
    expected = trained_head(tmp_path, loss, gate, batch=8).state_dict()
    assert expected["classifier.weight"].abs().max() > 0.01
    for rank in (0, 1):
        found = kept(two, f"{loss}-{gate}", rank)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for each in LOSSES:
        for policy in GATES:
            trained = trained_head(place / "runs", each, policy, batch=4)
            keep(place, f"{each}-{policy}", trained.state_dict())
