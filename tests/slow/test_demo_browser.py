"""The demo as a user meets it: the command, and its page in a browser."""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from PIL import Image

from hf_fixastep.evaluation.calibration import Calibration, write_calibration
from tests.short_runs import tiny_processor, tiny_vit


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
MISSING = [name for name in ("gradio", "playwright") if importlib.util.find_spec(name) is None]
MISSING += [] if CHROMIUM else ["chromium, a program"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}, which is not installed"),
]

HINT = "Drop an image to see its class."
NAMES = ["cat", "<img src=x onerror=\"window.ran = 'a class name'\">", "long " * 2000]


@pytest.fixture(scope="module")
def model():
    model = tiny_vit()
    model.config.id2label, model.config.label2id = (
        dict(enumerate(NAMES)),
        {name: at for at, name in enumerate(NAMES)},
    )
    return model.eval()


@pytest.fixture(scope="module")
def address(model, tmp_path_factory):
    """Of the page, served by the command; when it has ended, nothing is left of it."""
    home = tmp_path_factory.mktemp("home")
    model.save_pretrained(home / "<b>model")
    tiny_processor().save_pretrained(home / "<b>model")
    write_calibration(home / "<b>model", Calibration(2.0, abstain_below=0.99, coverage=0.9))
    (home / "uploads").mkdir()
    environment = {**os.environ, "TMPDIR": str(home / "uploads"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hf_fixastep", "demo", "<b>model"]
    server = subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert " is at http://127.0.0.1:" in line
        yield line.split()[3]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 143
    assert os.listdir(home / "uploads") == []
    assert sorted(os.listdir(home)) == ["<b>model", "uploads"]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(
    params=[("light", 1100), ("dark", 1100), ("light", 380)], ids=lambda value: f"{value[0]}-{value[1]}"
)
def page(address, browser, request):
    """A fresh tab, which must ask for nothing outside this machine, run nothing and report no error."""
    scheme, width = request.param
    context = browser.new_context(
        color_scheme=scheme,
        viewport={"width": width, "height": 700},
        permissions=["clipboard-read", "clipboard-write"],
    )
    asked, trouble = [], []
    context.on("request", lambda request: asked.append(request.url))
    context.on("dialog", lambda dialog: trouble.append(dialog.message) or dialog.dismiss())
    page = context.new_page()
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("websocket", lambda socket: asked.append(socket.url))
    page.goto(address)
    page.wait_for_selector("#image input[type=file]", state="attached")
    yield page
    assert {urlsplit(url).netloc for url in asked if urlsplit(url).scheme not in ("data", "blob")} == {
        urlsplit(address).netloc
    }
    assert (
        page.evaluate("document.querySelectorAll('link[rel=preconnect], link[rel=dns-prefetch]').length") == 0
    )
    assert page.evaluate("window.ran") is None
    assert trouble == []
    context.close()


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def expected(model, image: Image.Image) -> list[tuple[str, str]]:
    pixels = (np.asarray(image, dtype=np.float32) / 255 - 0.5) / 0.25
    with torch.no_grad():
        logits = model(torch.tensor(pixels).permute(2, 0, 1)[None]).logits[0].double().numpy()
    shares = np.exp(logits / 2) / np.exp(logits / 2).sum()
    return [(NAMES[at].strip(), f"{100 * shares[at]:.1f} %") for at in np.argsort(-shares)]


def choose(page, name: str, content: bytes) -> None:
    page.set_input_files("#image input[type=file]", {"name": name, "mimeType": "", "buffer": content})


def rows(page) -> list[tuple[str, str]]:
    page.wait_for_selector("#result tr")
    cells = page.locator("#result td")
    texts = [cells.nth(at).text_content().strip() for at in range(cells.count())]
    return list(zip(texts[::2], texts[1::2], strict=True))


def drop(page, content: bytes) -> None:
    """What the mouse does."""
    data = page.evaluate_handle(
        """content => {
            const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
            return data;
        }""",
        base64.b64encode(content).decode(),
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event("#image button[aria-label^=Drop]", event, {"dataTransfer": data})


def paste(page, content: bytes) -> None:
    page.evaluate(
        """async content => {
            const image = await (await fetch("data:image/png;base64," + content)).blob();
            await navigator.clipboard.write([new ClipboardItem({ "image/png": image })]);
        }""",
        base64.b64encode(content).decode(),
    )
    page.click("#image button[aria-label='Paste from clipboard']")


def size_of_shown_image(page) -> list[int]:
    page.wait_for_function("document.querySelector('#image img')?.naturalWidth > 0")
    return page.evaluate("(e => [e.naturalWidth, e.naturalHeight])(document.querySelector('#image img'))")


def luminance(color: list[float]) -> float:
    """Relative luminance of sRGB 0..255, as the Web Content Accessibility Guidelines define it."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("way", [drop, paste, lambda page, content: choose(page, "chosen.png", content)])
def test_an_image_gets_its_probabilities(way, page, model):
    assert page.inner_text("#result") == HINT
    way(page, encoded(picture(0)))
    assert rows(page) == expected(model, picture(0))
    assert page.locator("#result img").count() == 0
    sentence = (
        "Not sure: the highest probability is below 99.0 %, which 90.0 % of the validation images reached."
    )
    assert page.inner_text("#result .flag") == sentence
    assert size_of_shown_image(page) == [360, 360]
    page.click("#image button[aria-label='Remove Image']")
    page.wait_for_function(f"document.querySelector('#result').innerText.trim() == '{HINT}'")


def test_images_that_browsers_cannot_show_are_shown(page):
    deep = Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 109)
    choose(page, "deep.tif", encoded(deep, "TIFF"))
    rows(page)
    assert size_of_shown_image(page) == [360, 240]


def test_a_file_that_is_no_image_gets_a_sentence(page):
    choose(page, "image.png", b"no image")
    page.wait_for_selector("#result .flag")
    sentence = "This file cannot be classified: it is no image of a known format."
    assert page.inner_text("#result") == sentence
    assert page.locator("#image img").count() == 0
    choose(page, "<img src=x onerror=\"window.ran = 'a file name'\">.txt", b"a text")
    page.wait_for_selector("text=Invalid file type")


def test_the_page_fits_and_can_be_read(page):
    assert page.title() == "<b>model"
    assert page.inner_text("#title") == "<b>model"
    choose(page, "image.png", encoded(picture(0)))
    rows(page)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#result table").bounding_box()["height"] < 400  # in spite of the long name
    image, result = page.locator("#image").bounding_box(), page.locator("#result").bounding_box()
    if width < 600:
        assert result["y"] > image["y"] + image["height"]
    else:
        assert result["x"] > image["x"] + image["width"]
    for part in ("#title h1", "#result .flag", "#result .name", "#result td:last-child", "#result .note"):
        assert contrast(page, part) > 4.5, part


def contrast(page, part: str) -> float:
    """Of a text with the first background behind it that is not transparent."""
    color, opacity, background = page.evaluate(
        """part => {
            const rgb = color => color.match(/[0-9.]+/g).map(Number);
            const start = document.querySelector(part);
            let element = start;
            const opaque = e => (rgb(getComputedStyle(e).backgroundColor)[3] ?? 1) > 0;
            while (element.parentElement && !opaque(element)) element = element.parentElement;
            const style = getComputedStyle(start);
            return [rgb(style.color), Number(style.opacity), rgb(getComputedStyle(element).backgroundColor)];
        }""",
        part,
    )
    mixed = [opacity * a + (1 - opacity) * b for a, b in zip(color[:3], background[:3], strict=True)]
    lighter, darker = sorted([luminance(mixed), luminance(background[:3])], reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
