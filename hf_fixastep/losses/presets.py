"""What the settings of several methods share; each states its own in `settings`."""

from __future__ import annotations

from typing import Any


# "paper" is the default and what to use from scratch; "upstream" is what the official code executes, for
# comparison with published figures; "pretrained" is for fine-tuning.
PRESETS = ("paper", "upstream", "pretrained")

SGD: dict[str, Any] = {
    "optim": "sgd",
    "optim_args": "momentum=0.9,nesterov=true",
    "learning_rate": 3e-2,
    "weight_decay": 5e-4,
}
ADAM: dict[str, Any] = {"optim": "adam", "optim_args": None, "learning_rate": 2e-3, "weight_decay": 4e-5}
# Rivals in the line of Oliver et al., 2018, arXiv 1804.09170: no weight decay, a slow sigmoid ramp. The
# official codes multiply the learning rate by 0.2 near the end.
OLIVER: dict[str, Any] = {
    **ADAM,
    "learning_rate": 3e-4,
    "weight_decay": 0.0,
    "unlabeled_ramp": "sigmoid",
    "unlabeled_warmup_steps": 200000.0,
    "lr_cycle_steps": 0.0,
}

# What a method has where it states nothing else.
SHARED: dict[str, dict[str, Any]] = {
    "paper": {
        **SGD,
        "unlabeled_ratio": 1.0,
        "unlabeled_weight": 1.0,
        "unlabeled_ramp": "linear",
        "unlabeled_warmup_steps": 0.4,
        "lr_cycle_steps": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "head_rate_factor": 1.0,
        "mix_labeled": True,
        "batchnorm": "joint",
        "teacher_decay": 0.999,
        "labeled_view": "weak",
        "mix_per_batch": False,
        "divide_by_all_rows": False,
        "cutout": 0.5,
    },
    "upstream": {
        "unlabeled_warmup_steps": 419430.0,
        "lr_cycle_steps": 1048576.0,
        "mix_per_batch": True,
        "divide_by_all_rows": True,
        "cutout": 16.0,
    },
    "pretrained": {
        "optim": "adamw_torch",
        "optim_args": None,
        "learning_rate": 1e-4,
        "weight_decay": 0.05,
        "head_rate_factor": 30.0,
        "warmup_steps": 0.1,
        "lr_cycle_steps": 0.0,
        "lr_scheduler_type": "cosine",
        "mix_labeled": False,
        "batchnorm": "frozen",
        "teacher_decay": None,
    },
}
