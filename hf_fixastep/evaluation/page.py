"""A page in the browser that classifies the image dropped on it; it needs Gradio, the extra `demo`."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from html import escape
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from hf_fixastep.data.files import UnreadableImage, read_picture
from hf_fixastep.evaluation.calibration import Calibration
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.foreign import KnownImages
from hf_fixastep.evaluation.prediction import RESEARCH, judge


FOREIGN = 0.95  # share of known images that has to look more known, for a warning
ROWS = 10  # classes shown
LARGEST, SMALLEST = 1024, 360  # pixels of the image shown
UPLOADS_KEPT = (60, 300)  # how often they are deleted, and from which age on, in seconds
LOOPBACK = ["127.0.0.1", "localhost", "::1", "[::1]"]  # names of this machine
HINT = "<p class='note'>Drop an image to see its class.</p>"
CSS = """
.gradio-container { width: 100% !important; max-width: 960px !important; margin: auto !important; }
.gradio-container { --font: system-ui, sans-serif; }
.html-container { padding-left: 0 !important; padding-right: 0 !important; }
#title h1 { margin: 0; font-size: 1.25rem; font-weight: 600; overflow-wrap: anywhere; }
#image img { width: 100%; height: 100%; object-fit: contain; }
#result table { width: 100%; margin: 0.6rem 0; table-layout: fixed; border-collapse: collapse; }
#result td { padding: 0.35rem 0; }
#result td + td { width: 5rem; text-align: right; font-variant-numeric: tabular-nums; }
#result .name { max-height: 4.5em; overflow: hidden; overflow-wrap: anywhere; }
#result tr:first-child .name { font-weight: 600; }
#result .bar { height: 0.4rem; margin-top: 0.2rem; border-radius: 0.2rem; }
#result .bar { background: var(--border-color-primary); }
#result .bar div { height: 100%; border-radius: inherit; background: var(--color-accent); }
#result .flag { padding: 0.5rem 0.8rem; border-left: 0.3rem solid #d97706; }
#result .flag { background: var(--background-fill-secondary); }
#result .note { font-size: 0.85rem; opacity: 0.75; }
"""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def show(
    values: NDArray,
    names: list[str],
    calibration: Calibration | None,
    foreign: float | None = None,
    medical: bool = False,
) -> str:
    """HTML of the classes by probability, and of how sure the model is.

    Args:
        foreign: how foreign the image looks, as `KnownImages.foreignness` has it.
    """
    classes = np.argsort(-values, kind="stable")
    values = values[classes]
    rows = "".join(
        f"<tr><td><div class='name'>{escape(names[at])}</div>"
        f"<div class='bar'><div style='width: {100 * value:.1f}%'></div></div></td>"
        f"<td>{percent(value)}</td></tr>"
        for value, at in zip(values[:ROWS].tolist(), classes[:ROWS].tolist(), strict=True)
    )
    note, flag = "These probabilities were not calibrated.", ""
    if calibration is not None:
        note = f"Probabilities after temperature {calibration.temperature:.3g}."
        if values[0] < calibration.abstain_below:
            least, reached = percent(calibration.abstain_below), percent(calibration.coverage)
            flag = (
                f"the highest probability is below {least}, which {reached} of the validation images reached"
            )
            flag = f"<p class='flag'><b>Not sure</b>: {flag}.</p>"
    if len(names) > ROWS:
        note = f"{len(names) - ROWS} more classes share {percent(float(values[ROWS:].sum()))}. {note}"
    if foreign is not None:
        words = f"{percent(foreign)} of the held-out images of known classes look more like the labeled ones"
        if foreign >= FOREIGN:
            flag += f"<p class='flag'><b>Maybe none of these classes</b>: {words}.</p>"
        else:
            note = f"{note} {words}."
    if medical:
        note = f"{note} {RESEARCH}"
    return f"{flag}<table>{rows}</table><p class='note'>{note}</p>"


def classify(
    classifier: Classifier, path: str, known: KnownImages | None = None, medical: bool = False
) -> tuple[PIL.Image.Image | None, str]:
    """The image in a file, as the model gets it but for its size, and the result as HTML."""
    try:
        image = read_picture(path).image
    except UnreadableImage as error:
        return None, f"<p class='flag'>This file cannot be classified: {escape(str(error))}.</p>"
    shares, foreign = judge(classifier, [image], known)
    look = None if foreign is None else float(foreign[0])
    result = show(shares[0], classifier.classes, classifier.calibration, look, medical)
    return for_display(image), result


def for_display(image: PIL.Image.Image) -> PIL.Image.Image:
    """Large images smaller, for the browser's sake, and tiny ones larger, with their pixels in sight."""
    image.thumbnail((LARGEST, LARGEST))
    factor = max(1, SMALLEST // max(image.size))
    return image.resize((image.width * factor, image.height * factor), PIL.Image.Resampling.NEAREST)


@contextlib.contextmanager
def private_gradio() -> Iterator[Any]:
    """Gradio without telemetry and settings from elsewhere; its files lie in a folder that ends with it."""
    with tempfile.TemporaryDirectory(prefix="hf_fixastep-demo-") as folder:
        for name in [name for name in os.environ if name.startswith("GRADIO_")]:
            del os.environ[name]
        os.environ |= {
            "GRADIO_ANALYTICS_ENABLED": "False",
            # Uploads, else in a folder that all Gradio pages of a machine share and serve.
            "GRADIO_TEMP_DIR": folder,
            # Else a folder in the current one, which would be served as well.
            "GRADIO_EXAMPLES_CACHE": folder,
            "no_proxy": "*",  # Gradio asks its own page whether it is there
        }
        try:
            import gradio
        except ImportError:
            raise ValueError('The demo needs Gradio: pip install "hf_fixastep[demo]"') from None
        yield gradio


def build_page(gradio: Any, title: str, answer: Callable[[str], tuple[PIL.Image.Image | None, str]]) -> Any:
    """A place for an image beside one for the result.

    Args:
        answer: from the path of an uploaded file to the image to show and the result as HTML.
    """
    with gradio.Blocks(title=title, analytics_enabled=False, delete_cache=UPLOADS_KEPT) as page:
        gradio.HTML(f"<h1>{escape(title)}</h1>", elem_id="title", apply_default_css=False)
        with gradio.Row():
            with gradio.Column(min_width=300):
                image = gradio.Image(
                    sources=["upload", "clipboard"],
                    buttons=[],
                    format="png",
                    height=400,
                    label="Image",
                    elem_id="image",
                )
            with gradio.Column(min_width=300):
                result = gradio.HTML(HINT, elem_id="result", apply_default_css=False)
        # Gradio's own knows neither 16 bits nor what to say of no image.
        image.preprocess = lambda upload: upload.path
        # one at a time, as `read_picture` sets how strict all of Pillow is
        image.upload(answer, image, [image, result], api_visibility="private", concurrency_limit=1)
        image.clear(lambda: HINT, None, result, api_visibility="private")
    return page


def check_address(host: str, port: int | None) -> None:
    """Gradio would try a hundred ports, five seconds each."""
    try:
        socket.create_server((host, port or 0)).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"The page cannot be at {host}:{port or 7860} ({error}): give another --host or --port."
        ) from error


@contextlib.asynccontextmanager
async def answer_this_machine(app: Any) -> AsyncIterator[None]:
    """Refuse other names and origins, before anything of Gradio, which answers preflights itself.

    Else a page of the internet could give its own name the address of this machine, and read the answers.
    """
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import PlainTextResponse

    inner = TrustedHostMiddleware(app.middleware_stack, allowed_hosts=LOOPBACK, www_redirect=False)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        origins = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"origin"]
        refusal = PlainTextResponse("Invalid origin header", status_code=400)
        await (inner if all(map(is_local, origins)) else refusal)(scope, receive, send)

    app.middleware_stack = guarded
    yield


def is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in LOOPBACK
    except ValueError:
        return False


def serve(page: Any, host: str, port: int | None) -> None:
    """In a thread. Nothing leaves the machine, nothing is kept, nothing else on the disk can be read.

    Args:
        port: if not given, the first free one from 7860 on.
    """
    page.launch(
        app_kwargs={"lifespan": answer_this_machine} if host in LOOPBACK else {},
        server_name=host,
        server_port=port or None,
        css=CSS,
        share=False,
        ssr_mode=False,
        mcp_server=False,
        run_history=False,  # of the images, in the browser
        enable_monitoring=False,
        footer_links=[],
        max_file_size="200mb",
        quiet=True,
        prevent_thread_lock=True,
    )
