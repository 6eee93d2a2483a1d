"""fixastep demo: a page in the browser, on this machine only, that classifies the image dropped on it."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.foreign import KnownImages
from hf_fixastep.evaluation.page import build_page, check_address, classify, private_gradio, serve
from hf_fixastep.runs.arguments import option, parse, positional
from hf_fixastep.runs.folder import is_medical


@dataclass
class DemoArguments:
    """Which version of the model, and where the page is."""

    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.")
    host: str = option("127.0.0.1", "Address to listen on; any other lets others in.")
    port: int | None = option(None, "If not given, the first free one from 7860 on.")


def end(*_: Any) -> None:
    """Leave as after Ctrl-C, which deletes the uploads; once, so that a second signal does not stop that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, end)
    try:
        words, options = positional(argv)
        if len(words) != 1:
            raise ValueError(
                "The first argument has to be a model: a folder such as runs/quickstart, or a Hub name."
            )
        args, _ = parse((DemoArguments,), options)
        check_address(args.host, args.port)
        classifier = Classifier(words[0], args.revision)
        known, medical = KnownImages.of(words[0]), is_medical(words[0])
        with private_gradio() as gradio:
            page = build_page(gradio, words[0], lambda path: classify(classifier, path, known, medical))
            serve(page, args.host, args.port)
            print(f"{words[0]} is at {page.local_url} until Ctrl-C.", flush=True)
            try:
                page.block_thread()
            finally:
                page.close(verbose=False)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
