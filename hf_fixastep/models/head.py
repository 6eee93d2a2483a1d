"""The head of a pretrained network on its own, to be trained on cached features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from hf_fixastep.models.trainable import name_classes


@strict
class FeatureHeadConfig(PreTrainedConfig):
    """Shape of a head.

    Args:
        size: numbers per image.
        hidden_size: of a layer between features and classes; 0 for a linear head.
    """

    model_type = "fixastep_head"

    size: int = 1
    hidden_size: int = 0


class FeatureHead(PreTrainedModel):
    """Standardises features and classifies them, linearly or with one hidden layer.

    A new head answers the same for every image: its last layer starts at zero.
    """

    config: FeatureHeadConfig
    config_class = FeatureHeadConfig
    base_model_prefix = "head"
    main_input_name = "pixel_values"
    input_modalities = "image"
    scale: Tensor  # [size] one over the deviations
    shift: Tensor  # [size] minus the means, in deviations

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.ones(config.size))
        self.register_buffer("shift", torch.zeros(config.size))
        width = config.hidden_size or config.size
        self.hidden = nn.Linear(config.size, width) if config.hidden_size else None
        self.classifier = nn.Linear(width, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if module is self.classifier:
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

    @torch.no_grad()
    def standardise(self, mean: Any, deviation: Any) -> None:
        """Take features to mean 0 and deviation 1; numbers that never change are left out."""
        mean, deviation = torch.as_tensor(mean).double(), torch.as_tensor(deviation).double()
        scale = torch.where(deviation > 0, 1 / deviation, 0)
        self.scale.copy_(scale)
        self.shift.copy_(-mean * scale)

    @torch.no_grad()
    def start_from(self, weight: Any, bias: Any) -> None:
        """Answer as a linear classifier of raw features does."""
        if self.hidden is not None:
            raise ValueError(
                "A head with a hidden layer cannot start from a linear one; leave one of them out."
            )
        weight, bias = torch.as_tensor(weight).double(), torch.as_tensor(bias).double()
        own = torch.where(self.scale > 0, weight / self.scale.double(), 0)
        self.classifier.weight.copy_(own)
        self.classifier.bias.copy_(bias - own @ self.shift.double())

    def linear(self) -> tuple[Tensor, Tensor]:
        """Weight [K, size] and bias [K] of the linear classifier of raw features that this head is."""
        if self.hidden is not None:
            raise ValueError(
                "A head with a hidden layer does not fit into a network, which has one linear layer there; "
                "train a head with hidden_size 0."
            )
        weight = self.classifier.weight.double() * self.scale.double()
        bias = self.classifier.bias.double() + self.classifier.weight.double() @ self.shift.double()
        return weight.detach(), bias.detach()

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> ImageClassifierOutputWithNoAttention | tuple:
        """Logits of features [N, size], and the cross-entropy if there are labels."""
        if pixel_values is None:
            raise ValueError("The head needs pixel_values, features of shape [N, size].")
        features = torch.addcmul(self.shift, pixel_values, self.scale)
        if self.hidden is not None:
            features = nn.functional.gelu(self.hidden(features))
        logits = self.classifier(features)
        loss = None if labels is None else cross_entropy(logits.float(), labels)
        output = ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)
        return output if return_dict is not False else output.to_tuple()


def put_head(
    model: Any, head: nn.Linear, weight: Tensor, bias: Tensor, class_names: Sequence[str]
) -> nn.Linear:
    """Give a network another linear head, with classes of its own; returns it.

    Args:
        head: the layer to be replaced.
    """
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, own = name.rpartition(".")
    new = nn.Linear(head.in_features, len(class_names), device=head.weight.device, dtype=head.weight.dtype)
    with torch.no_grad():
        new.weight.copy_(weight)
        new.bias.copy_(bias)
    setattr(model.get_submodule(parent), own, new)
    model.config.num_labels = len(class_names)
    vars(model.config).pop("calibration", None)  # of the old head
    name_classes(model, class_names)
    return new
