"""Wide ResNet for image classification. Zagoruyko and Komodakis, 2016, arXiv 1605.07146."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, leaky_relu
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from hf_fixastep.models.configuration_wide_resnet import WideResNetConfig


class WideResNetBlock(nn.Module):
    """Two 3x3 convolutions, each behind batch norm and LeakyReLU, added to a shortcut.

    Args:
        stride: of the first convolution and of the shortcut.
        activate_shortcut: the shortcut starts after the first activation, not before it.
        skip_activation: the first convolution sees the raw input (the official code, see `upstream_block`).
    """

    def __init__(
        self,
        config: WideResNetConfig,
        channels: tuple[int, int],  # in, out
        stride: int,
        activate_shortcut: bool,
        skip_activation: bool,
    ) -> None:
        super().__init__()
        before, after = channels
        self.slope = config.leaky_slope
        self.activate_shortcut = activate_shortcut
        self.skip_activation = skip_activation
        self.bn1 = nn.BatchNorm2d(before, momentum=config.bn_momentum)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after, momentum=config.bn_momentum)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # In place where no backward needs what is overwritten: 7 % of the time and a third of the memory.
        # The first line also with skip_activation, where only the running statistics of bn1 remain of it.
        activated = leaky_relu(self.bn1(x), self.slope, inplace=True)
        residual = self.conv1(x if self.skip_activation else activated)
        residual = self.conv2(leaky_relu(self.bn2(residual), self.slope, inplace=True))
        return residual.add_(self.shortcut(activated if self.activate_shortcut else x))


def stage(config: WideResNetConfig, index: int) -> nn.Sequential:
    """The blocks of one stage; the first one changes channels and image size."""
    before = 16 if index == 0 else 16 * config.width * 2 ** (index - 1)
    after = 16 * config.width * 2**index
    first = WideResNetBlock(
        config,
        channels=(before, after),
        stride=1 if index == 0 else 2,
        activate_shortcut=index == 0,
        skip_activation=config.upstream_block and index > 0,
    )
    rest = [
        WideResNetBlock(config, (after, after), 1, False, False) for _ in range((config.depth - 4) // 6 - 1)
    ]
    return nn.Sequential(first, *rest)


class WideResNetForImageClassification(PreTrainedModel):
    """Pre-activation Wide ResNet with a linear classifier on the globally averaged features."""

    config: WideResNetConfig
    config_class = WideResNetConfig
    base_model_prefix = "wide_resnet"
    main_input_name = "pixel_values"
    input_modalities = "image"
    _no_split_modules = ["WideResNetBlock"]

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__(config)
        channels = 16 * config.width * 2 ** (config.num_stages - 1)
        self.stem = nn.Conv2d(config.num_channels, 16, 3, padding=1, bias=False)
        self.stages = nn.ModuleList(stage(config, index) for index in range(config.num_stages))
        self.bn = nn.BatchNorm2d(channels, momentum=config.bn_momentum)
        self.classifier = nn.Linear(channels, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # the base class would draw every convolution from N(0, 0.02)
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        elif isinstance(module, nn.Linear):
            init.xavier_normal_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None; accelerate asks for it before sharding."""

    def get_output_embeddings(self) -> None:
        """None; accelerate asks for it before sharding."""

    # Trainer 5.22 reads this signature: **kwargs would change the loss under gradient accumulation, and a
    # second name with "label" in it would remove the evaluation metrics.
    def forward(
        self,
        pixel_values: Tensor | None = None,  # [N, C, H, W]
        labels: Tensor | None = None,  # [N] class ids, or [N, K] probabilities
        return_dict: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> ImageClassifierOutputWithNoAttention | tuple:
        """Logits, the cross-entropy if there are labels, and on request the output of the stem and of every
        stage.

        The last hidden state is normalized and activated: its mean over the pixels is what the classifier
        sees.
        """
        if pixel_values is None:
            raise ValueError("The model needs pixel_values, a tensor of shape [N, C, H, W].")
        features = [self.stem(pixel_values)]
        for blocks in self.stages:
            features.append(blocks(features[-1]))
        features[-1] = leaky_relu(self.bn(features[-1]), self.config.leaky_slope, inplace=True)
        logits = self.classifier(features[-1].mean((2, 3)))
        loss = None if labels is None else cross_entropy(logits.float(), labels)

        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if return_dict is None:
            return_dict = self.config.return_dict
        output = ImageClassifierOutputWithNoAttention(
            loss=loss,
            logits=logits,
            hidden_states=tuple(features) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()
