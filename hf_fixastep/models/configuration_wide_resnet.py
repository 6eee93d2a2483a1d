"""Configuration of the Wide ResNet."""

# no `from __future__ import annotations` here: `strict` of huggingface_hub 2.4 would not check the types of
# the fields
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class WideResNetConfig(PreTrainedConfig):
    """Shape of a Wide ResNet; the defaults are the WRN-28-2 of semi-supervised benchmarks on 32x32 images.

    Args:
        depth: 6n + 4 for n blocks per stage, whatever the number of stages.
        width: factor on the channels 16, 32, 64, ... of the stages.
        num_stages: 3, or 4 for echocardiograms of 112x112 pixels; every stage after the first halves the
            image.
        num_channels: channels of the input images.
        image_size: height and width the model was trained on; the network itself takes any size.
        leaky_slope: slope of the LeakyReLU below zero.
        bn_momentum: weight of the new batch in the running statistics.
        upstream_block: feed the raw input to the first convolution of stages 2, 3, ... as the official code
            does. Needed for weights trained there; the batch norm in front of that convolution then gets no
            gradient.
    """

    model_type = "wide_resnet_fixastep"

    depth: int = 28
    width: int = 2
    num_stages: int = 3
    num_channels: int = 3
    image_size: int = 32
    leaky_slope: float | int = 0.1
    bn_momentum: float | int = 0.001
    upstream_block: bool = False

    def validate_architecture(self) -> None:
        """Called by `strict` after construction."""
        if self.depth < 10 or self.depth % 6 != 4:
            raise ValueError(
                f"depth is {self.depth}, but must be 6n + 4 with n >= 1: choose 10, 16, 22, 28, ..."
            )
        if self.width < 1:
            raise ValueError(f"width is {self.width}, but must be at least 1.")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}, but must be at least 1.")
