"""fixastep push: push a finished run or fit as a model, or a data set that may be passed on, to the Hub."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from huggingface_hub import CommitInfo

from hf_fixastep.features import fit_files
from hf_fixastep.hub.client import push_files
from hf_fixastep.hub.push import ALLOWED, prepare_model, push_dataset
from hf_fixastep.runs.arguments import DataArguments, option, parse
from hf_fixastep.runs.folder import CARD, RunFolder, as_saved


@dataclass
class PushArguments:
    """Where a model goes; what its training was told already need not be given again."""

    hub_model_id: str | None = option(None, "Name on the Hub, such as org/name.")
    hub_license: str | None = option(None, "Licence of the model, such as mit.")
    hub_intended_use: str | None = option(None, "What it is for; needed for medical data.")
    hub_private_repo: bool | None = option(None, "Make a new repository private.")
    hub_revision: str | None = option(None, "A branch to push to, if not main.")
    dry_run: bool = option(False, "Print the card and the list of files; push nothing.")


@dataclass
class DatasetArguments:
    """Where a data set goes."""

    hub_dataset_id: str = field(metadata={"help": "Name on the Hub, such as org/name."})
    hub_license: str | None = option(None, "Licence, for images of your own.")
    hub_private_repo: bool | None = option(None, "Make a new repository private.")
    hub_revision: str | None = option(None, "A branch to push to, if not main.")


OPTIONS = {"model": PushArguments, "data set": DatasetArguments, "data": DataArguments}


def push_model(folder: str, argv: list[str]) -> CommitInfo | None:
    args, told = parse((PushArguments,), argv)
    prepare: Callable[..., dict[str, bytes | Path]] = partial(fit_files.prepare_push, Path(folder))
    with as_saved(folder):
        if not (Path(folder) / fit_files.FACTS).is_file():
            run = RunFolder.read(folder)
            told = {name: value for name, value in run.recipe.items() if name in vars(args)} | told
            prepare = partial(prepare_model, run)
        files = prepare(*(told.get(f"hub_{name}") for name in ("model_id", "license", "intended_use")))
    if args.dry_run:
        card = files[CARD]
        assert isinstance(card, bytes)
        print(card.decode(), f"Files: {', '.join(sorted(files))}", sep="\n")
        return None
    return push_files(
        files,
        told["hub_model_id"],
        message="Push the model with its card",
        private=told.get("hub_private_repo"),
        revision=told.get("hub_revision"),
        stale=(*ALLOWED, fit_files.FACTS, *fit_files.FIGURES),
    )


def push_data(argv: list[str]) -> CommitInfo:
    data_args, args, _ = parse((DataArguments, DatasetArguments), argv)
    return push_dataset(
        data_args.dataset,
        data_args.config,
        args.hub_dataset_id,
        license=args.hub_license,
        private=args.hub_private_repo,
        revision=args.hub_revision,
        **data_args.settings,
    )


def main(argv: list[str]) -> None:
    try:
        if not argv:
            raise ValueError(
                "Give the folder of a finished run or fit, such as runs/quickstart, or --dataset NAME."
            )
        commit = push_data(argv) if argv[0].startswith("--") else push_model(argv[0], argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if commit is not None:
        print(f"Pushed: {commit.commit_url}")
