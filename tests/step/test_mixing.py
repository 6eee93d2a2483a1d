"""Phase 1. Numbers in brackets are the checks of the specification.

In the images of `telling_batch` every row of the pool has a pixel of its own, so that a mixture tells its
partner and its share.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hf_fixastep import WideResNetForImageClassification
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.mixing import guess_labels, mix_labeled, mixing_shares
from tests.short_runs import make_trainer


CLASSES = 3
GUESS_ALL = pytest.mark.parametrize("guess_all", [True, False])
PER_BATCH = pytest.mark.parametrize("per_batch", [True, False])


class Recorder(nn.Module):
    """A linear classifier of pixels, with or without batch norm, that keeps what it was called with."""

    def __init__(self, pixels: int, batchnorm: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(pixels) if batchnorm else nn.Identity()
        self.head = nn.Linear(pixels, CLASSES)
        self.calls: list[Tensor] = []
        self.with_gradient: list[bool] = []

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        self.calls.append(pixel_values)
        self.with_gradient.append(torch.is_grad_enabled())
        return SimpleNamespace(logits=self.head(self.norm(pixel_values.flatten(1))))


def recorder(batch: SemiBatch, batchnorm: bool = True) -> Recorder:
    model = Recorder(batch.x[0].numel(), batchnorm)
    nn.init.normal_(model.head.weight)
    return model.train()


def telling_batch(labeled: int = 8, weak: int = 8, weak_2: int | None = None) -> SemiBatch:
    """Image k of the pool [x; weak; weak_2] is zero but for pixel k; labels are one-hot."""
    sizes = [labeled, weak, weak if weak_2 is None else weak_2]
    x, first, second = torch.eye(sum(sizes)).view(sum(sizes), 1, 1, -1).split(sizes)
    y = torch.eye(CLASSES)[torch.arange(labeled) % CLASSES]
    return SemiBatch(x, y, {"weak": first, "weak_2": second})


def random_batch(labeled: int = 6, unlabeled: int = 6) -> SemiBatch:
    generator = torch.Generator().manual_seed(5)
    x, first, second = (torch.randn(n, 3, 8, 8, generator=generator) for n in (labeled, unlabeled, unlabeled))
    return SemiBatch(
        x, torch.eye(CLASSES)[torch.arange(labeled) % CLASSES], {"weak": first, "weak_2": second}
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def partners_and_shares(mixed: Tensor) -> tuple[list[int], list[float]]:
    """Read from mixtures of `telling_batch`; the share of an image mixed with itself is 1."""
    partners, shares = [], []
    for row, image in enumerate(mixed.flatten(1)):
        others = [i for i, pixel in enumerate(image.tolist()) if pixel != 0 and i != row]
        assert len(others) <= 1
        partners.append(others[0] if others else row)
        shares.append(image[row].item())
    return partners, shares


def told(seed: int, batch: SemiBatch, **kwargs: object) -> tuple[list[int], list[float]]:
    return partners_and_shares(mix_labeled(recorder(batch), batch, seeded(seed), **kwargs).x)


# ---- mixed batches [2]


@GUESS_ALL
def test_a_share_of_one_keeps_images_and_labels(monkeypatch: pytest.MonkeyPatch, guess_all: bool) -> None:
    """[2]"""
    monkeypatch.setattr(
        "hf_fixastep.step.mixing.mixing_shares", lambda count, alpha, generator: torch.ones(count)
    )
    batch = random_batch()
    mixed = mix_labeled(Recorder(192).train(), batch, seeded(), guess_all=guess_all)
    assert torch.equal(mixed.x, batch.x)
    assert torch.equal(mixed.y, batch.y)


@GUESS_ALL
def test_mixed_labels_sum_to_one(tiny_model: WideResNetForImageClassification, guess_all: bool) -> None:
    """[2]"""
    mixed = mix_labeled(tiny_model.train(), random_batch(), seeded(), guess_all=guess_all)
    torch.testing.assert_close(mixed.y.sum(-1), torch.ones(6))
    assert mixed.y.min() >= 0
    assert not torch.equal(mixed.y, random_batch().y)


@GUESS_ALL
@pytest.mark.parametrize(
    ("labeled", "weak", "weak_2"), [(8, 8, 8), (8, 3, 3), (3, 8, 8), (4, 28, 4), (4, 28, 2), (1, 1, 1)]
)
def test_the_mixed_batch_has_the_shape_of_the_labeled_one(
    labeled: int, weak: int, weak_2: int, guess_all: bool
) -> None:
    """[2]"""
    batch = telling_batch(labeled, weak, weak_2)
    mixed = mix_labeled(recorder(batch, batchnorm=False), batch, seeded(), guess_all=guess_all)
    assert (mixed.x.shape, mixed.y.shape) == (batch.x.shape, batch.y.shape)


@GUESS_ALL
@PER_BATCH
def test_half_or_more_of_every_image_stays_and_a_share_is_drawn_per_image_or_per_batch(
    per_batch: bool, guess_all: bool
) -> None:
    """[2]"""
    for seed in range(10):
        partners, shares = told(seed, telling_batch(), per_batch=per_batch, guess_all=guess_all)
        assert all(0.5 <= share <= 1 for share in shares)
        found = [share for row, share in enumerate(shares) if partners[row] != row]
        assert len(found) > 1
        assert len(set(found)) == (1 if per_batch else len(found))


@GUESS_ALL
def test_views_and_the_rest_of_the_batch_stay_as_they_are(guess_all: bool) -> None:
    batch = telling_batch()
    batch.index, batch.generator = torch.arange(8), seeded(3)
    kept = copy.deepcopy((batch.x, batch.y, batch.views))
    mixed = mix_labeled(recorder(batch), batch, seeded(), guess_all=guess_all)
    assert (mixed.views, mixed.index, mixed.generator) == (batch.views, batch.index, batch.generator)
    assert torch.equal(batch.x, kept[0])
    assert torch.equal(batch.y, kept[1])
    assert all(torch.equal(batch.views[name], view) for name, view in kept[2].items())


# ---- partners


@GUESS_ALL
def test_no_partner_is_taken_twice(guess_all: bool) -> None:
    for seed in range(30):
        partners, _ = told(seed, telling_batch(), guess_all=guess_all)
        assert len(set(partners)) == len(partners)


@GUESS_ALL
def test_every_row_of_the_pool_is_equally_likely_to_be_a_partner(guess_all: bool) -> None:
    batch, counts = telling_batch(), torch.zeros(24)
    model = recorder(batch)
    for seed in range(600):
        partners, _ = partners_and_shares(mix_labeled(model, batch, seeded(seed), guess_all=guess_all).x)
        counts[partners] += 1
    # A row is in the head of 8 out of 24 with probability 1/3: 200 times, standard deviation 11.5.
    assert (counts - 200).abs().max() < 4 * 11.5
    # Two thirds of all partners are unlabeled, of each image 400 of 600, standard deviation of the share
    # 0.0064.
    assert counts[8:].sum().item() / counts.sum().item() == pytest.approx(2 / 3, abs=0.02)


def test_guessing_for_chosen_partners_alone_chooses_the_same_partners_and_shares() -> None:
    for seed in range(30):
        assert told(seed, telling_batch(), guess_all=True) == told(seed, telling_batch(), guess_all=False)


def test_the_pool_takes_the_first_rows_of_the_weak_view() -> None:
    batch = telling_batch(labeled=4, weak=28, weak_2=4)
    found = {partner for seed in range(100) for partner in told(seed, batch)[0]}
    assert found == {*range(4), *range(4, 8), *range(32, 36)}


def test_the_pool_takes_all_rows_of_both_views_where_they_are_equally_many() -> None:
    batch = telling_batch(labeled=2, weak=7)
    assert {partner for seed in range(200) for partner in told(seed, batch)[0]} == set(range(16))


@GUESS_ALL
def test_nothing_is_drawn_from_the_global_generator(guess_all: bool) -> None:
    batch = telling_batch()
    model = recorder(batch)
    state = torch.get_rng_state()
    first = mix_labeled(model, batch, seeded(), guess_all=guess_all)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(mix_labeled(model, batch, seeded(), guess_all=guess_all).x, first.x)


def test_the_trainer_caps_the_pool_at_one_labeled_batch_of_each_view(
    tmp_path: Path, tiny_model: WideResNetForImageClassification
) -> None:
    """Trap 25; the Pi-model has both weak views of all unlabeled images anyway."""
    rows: list[int] = []
    tiny_model.stem.register_forward_pre_hook(lambda _, images: rows.append(len(images[0])))
    trainer = make_trainer(tmp_path, tiny_model, loss="pi_model", max_steps=1, unlabeled_ratio=3.0)
    assert trainer.args.mix_pool == "batch"
    trainer.train()
    # Guesses for each view, then labeled rows and first view together, then the second view.
    assert rows == [4, 4, 4 + 12, 12]


@pytest.mark.parametrize(
    ("loss", "forwards"),
    [
        ("pi_model", [12, 12, 4]),  # the target, the other view, the labeled images: nothing extra
        ("mean_teacher", [12, "chosen", 4]),
        ("pseudo_label", [12, "chosen", 4]),
        ("fixmatch", [12, 12, "chosen", 4]),
        ("vat", [12, 12, 12, "chosen", 4]),
    ],
)
def test_separate_forwards_guess_no_view_twice(
    loss: str, forwards: list, tmp_path: Path, tiny_model: WideResNetForImageClassification
) -> None:
    rows: list[int] = []
    tiny_model.stem.register_forward_pre_hook(
        lambda stem, images: rows.append(len(images[0])) if stem.training else None  # not the teacher's
    )
    make_trainer(
        tmp_path, tiny_model, loss=loss, max_steps=1, batchnorm="separate", unlabeled_ratio=3.0
    ).train()
    assert len(rows) == len(forwards)
    assert all(
        1 < row <= 4 if kind == "chosen" else row == kind for row, kind in zip(rows, forwards, strict=True)
    )


# ---- guesses [3]


@GUESS_ALL
def test_guessing_leaves_every_buffer_bit_for_bit(
    tiny_model: WideResNetForImageClassification, guess_all: bool
) -> None:
    """[3]"""
    tiny_model.train()(pixel_values=torch.randn(9, 3, 8, 8))  # statistics unlike the initial ones
    before = copy.deepcopy(dict(tiny_model.named_buffers()))
    mix_labeled(tiny_model, random_batch(), seeded(), guess_all=guess_all)
    assert len(before) > 3
    assert all(torch.equal(buffer, before[name]) for name, buffer in tiny_model.named_buffers())


def test_guesses_use_batch_statistics(tiny_model: WideResNetForImageClassification) -> None:
    """[3]"""
    views = list(random_batch().views.values())
    found = guess_labels(tiny_model.train(), *views, temperature=1.0)
    training = sum(copy.deepcopy(tiny_model)(pixel_values=view).logits.softmax(-1) for view in views) / 2
    evaluating = (
        sum(copy.deepcopy(tiny_model).eval()(pixel_values=view).logits.softmax(-1) for view in views) / 2
    )
    torch.testing.assert_close(found, training)
    assert (found - evaluating).abs().max() > 1e-2


@GUESS_ALL
def test_no_gradient_flows_into_guesses(guess_all: bool) -> None:
    batch = telling_batch()
    model = recorder(batch)
    mixed = mix_labeled(model, batch, seeded(), guess_all=guess_all)
    assert not mixed.x.requires_grad
    assert not mixed.y.requires_grad
    assert model.with_gradient
    assert not any(model.with_gradient)


def test_guess_all_forwards_each_view_on_its_own_and_whole() -> None:
    batch = telling_batch(labeled=4, weak=28, weak_2=4)
    model = recorder(batch)
    mix_labeled(model, batch, seeded(), guess_all=True)
    first, second = model.calls
    assert torch.equal(first, batch.views["weak"][:4])
    assert torch.equal(second, batch.views["weak_2"])


@pytest.mark.parametrize("seed", range(5))
def test_otherwise_only_both_views_of_chosen_partners_are_forwarded(seed: int) -> None:
    batch = telling_batch(labeled=4, weak=9)
    model = recorder(batch)
    partners, _ = partners_and_shares(mix_labeled(model, batch, seeded(seed), guess_all=False).x)
    chosen = sorted({(partner - 4) % 9 for partner in partners if partner >= 4})
    (images,) = model.calls
    assert 0 < len(chosen) <= 4
    assert torch.equal(images, torch.cat([batch.views["weak"][chosen], batch.views["weak_2"][chosen]]))


def test_without_an_unlabeled_partner_the_model_is_not_called() -> None:
    batch, called = telling_batch(labeled=1, weak=1), {}
    for seed in range(20):
        model = recorder(batch, batchnorm=False)
        partners, _ = partners_and_shares(mix_labeled(model, batch, seeded(seed), guess_all=False).x)
        called.setdefault(partners[0] > 0, set()).add(len(model.calls))
    assert called == {True: {1}, False: {0}}


@PER_BATCH
def test_guess_all_is_the_procedure_of_the_official_code(
    tiny_model: WideResNetForImageClassification, per_batch: bool
) -> None:
    """Section 1.2 of the specification, steps 2 to 4, row by row."""
    batch, model = random_batch(), tiny_model.train()
    nn.init.normal_(model.classifier.weight)  # predictions far from uniform
    first, second = batch.views["weak"], batch.views["weak_2"]
    reference = copy.deepcopy(model)
    with torch.no_grad():
        predictions = [reference(pixel_values=view).logits.double().softmax(-1) for view in (first, second)]
    guesses = []
    for one, other in zip(*predictions, strict=True):
        powers = [((a + b) / 2) ** (1 / 0.7) for a, b in zip(one.tolist(), other.tolist(), strict=True)]
        guesses.append(torch.tensor([power / sum(powers) for power in powers]))
    images, labels = [*batch.x, *first, *second], [*batch.y, *guesses, *guesses]
    generator = seeded(11)
    permutation = torch.randperm(18, generator=generator).tolist()
    shares = mixing_shares(1 if per_batch else 6, 0.4, generator).tolist() * (6 if per_batch else 1)

    mixed = mix_labeled(
        model, batch, seeded(11), alpha=0.4, temperature=0.7, per_batch=per_batch, guess_all=True
    )
    assert any(partner >= 6 for partner in permutation[:6])
    for row, (partner, share) in enumerate(zip(permutation[:6], shares, strict=True)):
        torch.testing.assert_close(mixed.x[row], share * images[row] + (1 - share) * images[partner])
        torch.testing.assert_close(mixed.y[row], share * labels[row] + (1 - share) * labels[partner])


def test_without_batch_norm_it_does_not_matter_which_rows_are_guessed() -> None:
    batch = telling_batch(labeled=8, weak=5)
    model = recorder(batch, batchnorm=False)
    for seed in range(10):
        every, chosen = (
            mix_labeled(model, batch, seeded(seed), guess_all=guess_all) for guess_all in (True, False)
        )
        assert torch.equal(every.x, chosen.x)
        torch.testing.assert_close(every.y, chosen.y)


def test_chosen_guesses_share_the_batch_statistics_of_the_chosen_rows() -> None:
    batch = random_batch(labeled=4, unlabeled=9)
    model = Recorder(192).train()
    generator = seeded(2)
    partners = torch.randperm(4 + 18, generator=generator)[:4]
    shares = mixing_shares(4, 0.5, generator)
    chosen = sorted({(int(partner) - 4) % 9 for partner in partners if partner >= 4})
    both = torch.cat([batch.views["weak"][chosen], batch.views["weak_2"][chosen]])
    with torch.no_grad():
        one, other = copy.deepcopy(model)(pixel_values=both).logits.softmax(-1).chunk(2)
    squares = ((one + other) / 2) ** 2
    guesses = dict(zip(chosen, squares / squares.sum(-1, keepdim=True), strict=True))
    mixed = mix_labeled(model, batch, seeded(2), guess_all=False)
    for row, (partner, share) in enumerate(zip(partners.tolist(), shares.tolist(), strict=True)):
        label = batch.y[partner] if partner < 4 else guesses[(partner - 4) % 9]
        torch.testing.assert_close(mixed.y[row], share * batch.y[row] + (1 - share) * label)


# ---- logits that a loss has already


def test_a_view_whose_logits_are_known_is_not_forwarded_again() -> None:
    batch = telling_batch(labeled=4, weak=9)
    model = recorder(batch)
    batch.logits["weak"] = torch.randn(9, CLASSES)
    partners, _ = partners_and_shares(mix_labeled(model, batch, seeded(), guess_all=False).x)
    chosen = sorted({(partner - 4) % 9 for partner in partners if partner >= 4})
    assert len(chosen) > 1
    assert [images.shape for images in model.calls] == [batch.views["weak_2"][chosen].shape]
    assert torch.equal(model.calls[0], batch.views["weak_2"][chosen])
    batch.logits["weak_2"] = torch.randn(9, CLASSES)
    mix_labeled(model, batch, seeded(), guess_all=False)
    assert len(model.calls) == 1


def test_known_logits_are_the_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fixastep.step.mixing.mixing_shares", lambda count, *_: torch.full((count,), 0.5))
    batch = telling_batch(labeled=4, weak=9)
    # More rows than the pool.
    batch.logits = {"weak": torch.randn(20, CLASSES), "weak_2": torch.randn(20, CLASSES)}
    mixed = mix_labeled(recorder(batch), batch, seeded(), guess_all=False, pool_rows=9)
    for row, partner in enumerate(partners_and_shares(mixed.x)[0]):
        if partner >= 4:
            one, other = (logits[(partner - 4) % 9].double().softmax(-1) for logits in batch.logits.values())
            squares = ((one + other) / 2) ** 2
            torch.testing.assert_close(
                mixed.y[row].double(), 0.5 * batch.y[row] + 0.5 * squares / squares.sum()
            )


def test_one_partner_is_never_alone_in_batch_norm() -> None:
    rows = set()
    for seed in range(40):
        batch = telling_batch(labeled=2, weak=3)
        model = recorder(batch)  # which would refuse a batch of one
        batch.logits["weak"] = torch.zeros(3, CLASSES)
        mix_labeled(model, batch, seeded(seed), guess_all=False)
        rows |= {len(images) for images in model.calls}
    assert rows == {2}


def test_guesses_from_chosen_rows_are_those_from_all_rows_on_average() -> None:
    """Batch statistics of a part of the rows scatter around those of all of them."""
    batch = random_batch(labeled=64, unlabeled=64)
    batch.y = torch.eye(CLASSES)[torch.arange(64) % CLASSES]
    torch.manual_seed(3)
    model = Recorder(192).train()
    nn.init.normal_(model.head.weight, std=0.1)
    whole = guess_labels(model, batch.views["weak"], batch.views["weak_2"], temperature=1.0)
    differences = []
    for seed in range(200):
        # As many as 64 partners have on average, 5/9.
        chosen = torch.randperm(64, generator=seeded(seed))[:36]
        views = [view[chosen] for view in batch.views.values()]
        difference = torch.full_like(whole, torch.nan)
        difference[chosen] = guess_labels(model, *views, temperature=1.0, together=True) - whole[chosen]
        differences.append(difference)
    scatter = torch.stack(differences)
    assert scatter.nanmean(0).abs().mean() < 0.015  # of probabilities that differ from row to row by
    assert whole.std(0).mean() > 0.15
    assert scatter[~scatter.isnan()].std() < 0.05


@GUESS_ALL
def test_both_views_of_an_image_have_the_same_guess(monkeypatch: pytest.MonkeyPatch, guess_all: bool) -> None:
    monkeypatch.setattr("hf_fixastep.step.mixing.mixing_shares", lambda count, *_: torch.full((count,), 0.5))
    batch = telling_batch(labeled=4, weak=1)
    batch.y = torch.eye(CLASSES)[[0, 0, 0, 0]]
    model, pairs = recorder(batch, batchnorm=False), 0
    for seed in range(30):
        mixed = mix_labeled(model, batch, seeded(seed), guess_all=guess_all)
        partners, _ = partners_and_shares(mixed.x)
        if {4, 5} <= set(partners):
            torch.testing.assert_close(mixed.y[partners.index(4)], mixed.y[partners.index(5)], rtol=0, atol=0)
            pairs += 1
    assert pairs > 5
