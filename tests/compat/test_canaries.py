"""One canary per place where we rely on the inside of another library.

A canary that dies says what changed upstream and what of ours depends on it. The code is then to be read
again, and the canary with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import accelerate.utils
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer


@dataclass(frozen=True)
class Canary:
    """Lines of a function that have to be there, in this order.

    Args:
        parameters: names of its parameters, where we override it.
        reason: what of ours depends on it.
    """

    function: Callable
    lines: tuple[str, ...]
    reason: str
    parameters: tuple[str, ...] | None = None


CANARIES = [
    Canary(
        Trainer._save_checkpoint,
        (
            'checkpoint_folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"',
            "run_dir = self._get_output_dir(trial=trial)",
            "self.save_model(output_dir, _internal_call=True)",
            "self.state.best_model_checkpoint = best_checkpoint_dir",
            "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
            "rotate_checkpoints(",
            "save_total_limit=self.args.save_total_limit",
        ),
        "our _save_checkpoint hides save_total_limit, and adds the log and the manifest afterwards",
        ("self", "model", "trial"),
    ),
    Canary(
        Trainer._maybe_log_save_evaluate,
        (
            "logs: dict[str, float] = {}",
            'logs["loss"] = ',
            "self._total_loss_scalar += tr_loss_scalar",
            "self._globalstep_last_logged = self.state.global_step",
            "self.log(logs, start_time)",
            "self._save_checkpoint(model, trial)",
            "self.callback_handler.on_save(",
        ),
        "our log() and the saved sums of the log rely on the order of these",
    ),
    Canary(
        Trainer.train,
        ("self._load_from_checkpoint(resume_from_checkpoint)", "self._inner_training_loop"),
        "our _load_from_checkpoint loads raw and averaged weights here",
    ),
    Canary(
        Trainer._load_from_checkpoint,
        ("resume_from_checkpoint",),
        "we override it whole",
        ("self", "resume_from_checkpoint", "model"),
    ),
    Canary(
        Trainer._inner_training_loop,
        (
            "self.set_initial_training_values(args, train_dataloader)",
            "self._prepare_for_training(",
            "self._tr_loss = torch.tensor(0.0",
            "self._total_loss_scalar = 0.0",
            "self._globalstep_last_logged = self.state.global_step",
            "self.callback_handler.on_train_begin(",
            "if args.eval_on_start:",
            "for epoch in range(epochs_trained, num_train_epochs):",
            "return self._finalize_training(",
        ),
        "set_up() restores the log in on_train_begin; a finished run resumes with no epochs left",
    ),
    Canary(
        Trainer._prepare_for_training,
        (
            "self.create_optimizer()",
            "model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)",
            "self.create_scheduler(num_training_steps=max_steps)",
            "self._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)",
            "self._load_optimizer_and_scheduler(resume_from_checkpoint)",
        ),
        "the twin for FSDP2 is made in create_optimizer, and settings are noted in create_scheduler",
    ),
    Canary(
        Trainer._run_epoch,
        (
            "self.get_batch_samples(",
            "self.training_step(model, inputs, num_items_in_batch)",
            "self._tr_loss += tr_loss_step",
            "grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)",
            "self.optimizer.step()",
            "self.callback_handler.on_step_end(",
        ),
        "training_step leaves the gated gradient in .grad, and the teacher follows in on_step_end",
    ),
    Canary(Trainer._get_grad_norm, ("grad_norm",), "we override it whole", ("self", "model", "grad_norm")),
    Canary(
        Trainer._finalize_training,
        (
            'metrics["train_loss"] = train_loss',
            "self.log(metrics)",
            "self._load_best_model()",
            "self.callback_handler.on_train_end(",
        ),
        "our log() corrects train_loss, and the teacher ends in on_train_end after the best model was loaded",
    ),
    Canary(
        Trainer._load_best_model, ("self.state.best_model_checkpoint",), "we override it whole", ("self",)
    ),
    Canary(
        Trainer._push_from_checkpoint,
        ("checkpoint_folder",),
        "we override it with nothing",
        ("self", "checkpoint_folder"),
    ),
    Canary(
        Trainer.create_scheduler,
        ("if self.lr_scheduler is None:", "self._created_lr_scheduler = True"),
        "our create_scheduler sets the same mark",
    ),
    Canary(
        accelerate.utils.fsdp2_prepare_model,
        ("get_input_embeddings",),
        "Twin hides the input embeddings; without these lines it need not",
    ),
]


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.function.__name__)
def test_the_lines_that_we_rely_on_are_there(canary: Canary) -> None:
    name, source, at = canary.function.__qualname__, inspect.getsource(canary.function), 0
    for line in canary.lines:
        found = source.find(line, at)
        assert found >= 0, (
            f"{name} has no more {line!r} in this place; look at what depends on it: {canary.reason}."
        )
        at = found
    if canary.parameters is not None:
        parameters = tuple(inspect.signature(canary.function).parameters)
        assert parameters == canary.parameters, (
            f"{name} takes {', '.join(parameters)} now; look at what depends on it: {canary.reason}."
        )


def test_a_schedule_keeps_the_rates_that_are_logged_under_the_key_that_we_set() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    schedule.load_state_dict(schedule.state_dict() | {"base_lrs": [0.25], "_last_lr": [0.125]})
    assert (schedule.base_lrs, schedule.get_last_lr()) == ([0.25], [0.125])


def test_gamma_draws_take_a_generator_and_follow_it() -> None:
    first, second = (
        torch._standard_gamma(torch.ones(3), generator=torch.Generator().manual_seed(0)) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_many_tensors_are_copied_at_once() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    torch._foreach_copy_(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_the_compiler_can_be_told_to_keep_its_buffers() -> None:
    from torch._functorch import config

    assert isinstance(config.donated_buffer, bool)
