"""What the settings of several methods share; each states its own in `settings`."""

from __future__ import annotations

from typing import Any


# "paper" is the default and what to use for new work; "upstream" is what the official code executes, for
# comparison with published figures.
PRESETS = ("paper", "upstream")

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
}
