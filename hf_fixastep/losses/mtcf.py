from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_not_negative, check_positive
from hf_fixastep.losses.functional import mean_of_repeats, rows_of_all
from hf_fixastep.losses.presets import ADAM
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import classification_head, frozen_batchnorm, head_inputs
from hf_fixastep.step.mixing import average_guess, mix_with_each_other
from hf_fixastep.step.schedules import unlabeled_ramp


class MTCF(SemiSupervisedLoss):
    """MixMatch on the unlabeled images that look labeled to a second head, which tells the two apart.

    The multi-task curriculum framework. An unlabeled image's score is at first 0, later the mean of what the
    domain head said at its last visits. Scores are the head's targets (labeled images: 1), and Otsu's
    threshold on them chooses the images. The domain term, with targets for all images, belongs to the labeled
    loss, so that the gate judges MixMatch's unlabeled term alone. Its rows are those of the step's two
    batches instead of a third one; the chosen rows are repeated to fill the unlabeled batch. The official
    code records an image that was not visited in an epoch as 0; here its score stays.

    Args:
        temperature: exponent 1 / temperature sharpens the guesses.
        alpha: shape of the Beta distribution of the mixing shares.
        warmup_steps: steps that train the domain head alone; by default 100 passes over 18,800 images by 64.
        ramp_steps: in which MixMatch's unlabeled term grows afterwards, when a ramp of the run would be over.
        visits: domain predictions that make a score; with fewer it is 0.
        epoch_steps: steps between two choices of the threshold.
    """

    name = "mtcf"
    title = "MTCF"
    paper = "Yu et al., 2020, arXiv 2007.11330"
    citation = """
    @inproceedings{yu2020multitask,
      title = {Multi-Task Curriculum Framework for Open-Set Semi-Supervised Learning},
      author = {Yu, Qing and Ikami, Daiki and Irie, Go and Aizawa, Kiyoharu},
      booktitle = {European Conference on Computer Vision},
      year = {2020}
    }"""
    settings = {
        "paper": {
            **ADAM,
            "optim": "adamw_torch",
            "weight_decay": 2e-2,
            "unlabeled_weight": 75.0,
            "unlabeled_warmup_steps": 0.0,
            "lr_cycle_steps": 0.0,
        }
    }
    rival = True
    views = ("weak", "weak_2")
    mixable = False  # it mixes by itself
    average_buffers = False
    history: Tensor  # [unlabeled rows, visits] the last domain predictions, in a ring
    visited: Tensor  # [unlabeled rows] how many there were
    threshold: Tensor  # of scores

    def __init__(
        self,
        temperature: float = 0.5,
        alpha: float = 0.75,
        warmup_steps: int = 29_400,
        ramp_steps: int = 16_384,
        visits: int = 10,
        epoch_steps: int = 1024,
    ) -> None:
        super().__init__()
        check_positive(temperature=temperature, alpha=alpha, visits=visits, epoch_steps=epoch_steps)
        check_not_negative(warmup_steps=warmup_steps, ramp_steps=ramp_steps)
        self.temperature = temperature
        self.alpha = alpha
        self.warmup_steps = warmup_steps
        self.ramp_steps = ramp_steps
        self.visits = visits
        self.epoch_steps = epoch_steps

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        self.num_labels = num_labels
        self.domain = nn.Linear(classification_head(model, num_labels).in_features, 1)
        self.register_buffer("history", torch.zeros(unlabeled_rows, self.visits))
        self.register_buffer("visited", torch.zeros(unlabeled_rows, dtype=torch.int64))
        self.register_buffer("threshold", torch.zeros(()))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        scores = self.scores(batch.index)
        since = batch.step - self.warmup_steps
        if since < 0:
            return Losses(self.domain_loss(model, batch, scores), None)
        if since % self.epoch_steps == 0:
            self.threshold.copy_(otsu(self.scores()))
        labeled, unlabeled = self.mixmatch(model, batch, scores)
        labeled = labeled + self.domain_loss(model, batch, scores)
        kept = (scores >= self.threshold).float().mean()
        return Losses(
            labeled, unlabeled_ramp("linear", since + 1, self.ramp_steps) * unlabeled, {"mask_rate": kept}
        )

    def scores(self, index: Tensor | None = None) -> Tensor:
        """Of these rows, or of all; larger is more like a labeled image."""
        history, visited = (s if index is None else s[index] for s in (self.history, self.visited))
        return torch.where(visited >= self.visits, history.mean(1), 0.0)

    def domain_loss(self, model: nn.Module, batch: SemiBatch, scores: Tensor) -> Tensor:
        """Binary cross-entropy of the domain head; also records what it says."""
        images = [batch.x, batch.views["weak"]]
        with frozen_batchnorm(model), head_inputs(model, batch.y.shape[1]) as seen:
            for rows in [torch.cat(images)] if self.batchnorm == "joint" else images:
                model(pixel_values=rows)
        logits = self.domain(torch.cat(seen).to(self.domain.weight.dtype)).squeeze(1)
        self.record(batch.index, logits[len(batch.x) :].sigmoid())  # type: ignore[arg-type]
        return F.binary_cross_entropy_with_logits(logits, torch.cat([scores.new_ones(len(batch.x)), scores]))

    @torch.no_grad()
    def record(self, index: Tensor, probabilities: Tensor) -> None:
        index, values = rows_of_all(index, probabilities[:, None])
        values = mean_of_repeats(index, values, len(self.history)).squeeze(1)
        visited = self.visited[index]
        self.history[index, visited % self.visits] = values.to(self.history.dtype)
        self.visited[index] = visited + 1

    def mixmatch(self, model: nn.Module, batch: SemiBatch, scores: Tensor) -> tuple[Tensor, Tensor]:
        """MixMatch's two losses, with the chosen rows as unlabeled batch."""
        rows = self.chosen(scores)
        views = [batch.views[name][rows] for name in self.views]
        with torch.no_grad(), frozen_batchnorm(model):
            guess = average_guess([model(pixel_values=view).logits for view in views], self.temperature)
        images, y = torch.cat([batch.x, *views]), torch.cat([batch.y, guess, guess])
        images, y = mix_with_each_other(images, y, self.alpha, self.generator(batch))
        count = len(batch.x)
        mixed = replace(batch, x=images[:count], views={"mixed": images[count:]})
        labeled, unlabeled = self.logits(model, mixed, "mixed")
        return self.labeled_loss(labeled, y[:count]), F.mse_loss(unlabeled.softmax(-1), y[count:])

    def chosen(self, scores: Tensor) -> Tensor:
        """As many rows as there are, those at the threshold or above in turn, the best one if none is."""
        count = (scores >= self.threshold).sum().clamp_min(1)
        return scores.argsort(descending=True, stable=True)[
            torch.arange(len(scores), device=scores.device) % count
        ]

    @torch.no_grad()
    def outlier_score(self, model: nn.Module, images: Tensor) -> Tensor:
        """Probability that an image is not like the labeled ones."""
        with head_inputs(model, self.num_labels) as seen:
            model(pixel_values=images)
        return 1 - self.domain(seen[0].to(self.domain.weight.dtype)).squeeze(1).sigmoid()


def otsu(scores: Tensor) -> Tensor:
    """The score where the upper of two groups starts, if they are cut where their means are furthest apart.

    Otsu, 1979: the largest variance between the groups, here over all cuts and not those of a histogram. If
    all scores are equal, all are in the upper group.
    """
    ordered = scores.double().sort().values
    count, sums = len(ordered), ordered.cumsum(0)
    lower = torch.arange(1, count, device=scores.device, dtype=ordered.dtype)
    between = (
        lower * (count - lower) * (sums[:-1] / lower - (sums[-1] - sums[:-1]) / (count - lower)).square()
    )
    possible = ordered[1:] > ordered[:-1]  # equal scores stay together
    cut = torch.cat([between.new_zeros(1), torch.where(possible, between, -1.0)]).argmax()
    return ordered.take(cut).to(scores.dtype)  # an index would wait for the device
