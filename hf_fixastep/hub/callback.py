"""Push a run: when the trainer is told to, and at every save if so set."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import HubStrategy

from hf_fixastep.disk import digest
from hf_fixastep.hub import client
from hf_fixastep.hub.checks import check_push
from hf_fixastep.hub.push import ALLOWED, prepare_model
from hf_fixastep.runs.folder import LOG, WEIGHTS, RunFolder
from hf_fixastep.runs.report import RunReport


if TYPE_CHECKING:
    from hf_fixastep.trainer import FixAStepTrainer


logger = logging.getLogger(__name__)


class HubCardCallback(RunReport, TrainerCallback):
    """The report of a run that can be pushed, at the end and at every save."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        super().__init__(trainer)
        self.pushing: threading.Thread | None = None

    def create_repo(self, token: str | None = None) -> str:
        """Make the repository before the training, so that nothing is missed after it."""
        args = self.trainer.args
        check_push(args)
        where: dict[str, Any] = {"private": args.hub_private_repo, "token": token or args.hub_token}
        return client.create_repo(str(args.hub_model_id), **where)

    def push(self, message: str = "End of training", **where: Any) -> CommitInfo:
        """Push the model in the output folder, where it stays whatever happens.

        Args:
            where: token and revision, if other than those of the settings.
        """
        try:
            return self._push(self._files(RunFolder.read(self.folder)), message, **where)
        except (OSError, ValueError) as error:
            raise OSError(f"{error} The model is saved; to push it: fixastep push {self.folder}") from error

    def _files(self, run: RunFolder) -> dict[str, bytes | Path]:
        args = self.trainer.args
        return prepare_model(run, args.hub_model_id, args.hub_license, args.hub_intended_use)

    def _push(self, files: dict[str, bytes | Path], message: str, **where: Any) -> CommitInfo:
        args = self.trainer.args
        usual = {"private": args.hub_private_repo, "revision": args.hub_revision, "token": args.hub_token}
        where = usual | {name: value for name, value in where.items() if value is not None}
        return client.push_files(files, str(args.hub_model_id), message=message, stale=ALLOWED, **where)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wanted = (
            args.push_to_hub and args.hub_strategy == HubStrategy.EVERY_SAVE and state.is_world_process_zero
        )
        if not wanted or (self.pushing is not None and self.pushing.is_alive()):
            return
        try:
            files = self._files(self._checkpoint())
        except ValueError as error:
            logger.warning("%s Nothing was pushed; the training goes on.", error)
            return
        # The checkpoint may be pruned meanwhile.
        files[WEIGHTS] = Path(str(files[WEIGHTS])).read_bytes()
        self.pushing = threading.Thread(target=self._push_aside, args=(files, state.global_step), daemon=True)
        self.pushing.start()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.pushing is not None:
            self.pushing.join()

    def _checkpoint(self) -> RunFolder:
        """The checkpoint that was just saved, with the results of this very step, if it has some."""
        state = self.trainer.state
        results: dict[str, float] = {}
        for row in state.log_history:
            if row.get("step") == state.global_step:
                results |= {f"validation_{name[5:]}": row[name] for name in row if name.startswith("eval_")}
        folder = self.folder / f"checkpoint-{state.global_step}"
        facts = self.facts(results) | {"weights": digest(folder / WEIGHTS)}
        return RunFolder(folder, facts, self.settings(), self.folder / LOG)

    def _push_aside(self, files: dict[str, bytes | Path], step: int) -> None:
        try:
            self._push(files, f"Training in progress, step {step}")
        except OSError as error:
            logger.warning("%s The training goes on.", error)
