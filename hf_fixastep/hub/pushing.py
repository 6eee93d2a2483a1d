"""What a Trainer does about the Hub; the code for it is loaded when it is needed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from hf_fixastep.config import FixAStepConfig
from hf_fixastep.hub.checks import check_push


if TYPE_CHECKING:
    from hf_fixastep.hub.callback import HubCardCallback


class PushingTrainer(Trainer):
    """A Trainer whose models go to the Hub with a card of their own, and nothing else with them."""

    args: FixAStepConfig

    @cached_property
    def card(self) -> HubCardCallback:
        from hf_fixastep.hub.callback import HubCardCallback

        return HubCardCallback(self)  # type: ignore[arg-type]

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        if self.is_world_process_zero():
            self.hub_model_id: Any = self.card.create_repo(token)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Describe the saved model for those who get it; evaluates it first."""
        results = {} if self.eval_dataset is None else self.evaluate(metric_key_prefix="validation")
        if self.is_world_process_zero():
            self.card.write(self.card.facts(results))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its card, and push what `cards.ALLOWED` lists; returns when that is done."""
        check_push(self.args)
        self.save_model(_internal_call=True)
        self.create_model_card()
        if not self.is_world_process_zero():
            return None
        return self.card.push(commit_message or "End of training", token=token, revision=revision)
