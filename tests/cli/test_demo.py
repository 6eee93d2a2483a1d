from __future__ import annotations

import html.parser
import http.client
import importlib.util
import io
import json
import os
import re
import socket
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from hf_fixastep.cli import demo
from hf_fixastep.evaluation import page as demo_page
from hf_fixastep.evaluation.calibration import Calibration
from hf_fixastep.evaluation.classifier import Classifier
from tests.short_runs import tiny_processor, tiny_vit


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</td></tr></table><h1>",
    "&lt;b&gt; &amp;",
    "\" ' onmouseover='alert(1)",
    "${alert(1)} {{1 + 1}} {% raw %}",
    "x" * 10_000,
    "\x1b[31m\u202e",
    "a\nb",
    "",
]


class Text(html.parser.HTMLParser):
    """What a browser would make of it: tags, attributes, and the text of each cell and paragraph."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.parts = set(), set(), []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag in ("td", "p"):
            self.parts.append("")

    def handle_data(self, data) -> None:
        self.parts[-1] += data


def shown(shares: list[float], names: list[str], calibration: Calibration | None = None) -> list[str]:
    return Text(demo_page.show(np.array(shares), names, calibration)).parts


def test_classes_come_by_probability():
    assert shown([0.25, 0.6251, 0.125], ["cat", "dog", "owl"])[:6] == [
        "dog",
        "62.5 %",
        "cat",
        "25.0 %",
        "owl",
        "12.5 %",
    ]


def test_two_classes_of_the_same_name_are_both_shown():
    assert shown([0.4, 0.6], ["crane", "crane"])[:4] == ["crane", "60.0 %", "crane", "40.0 %"]


def test_of_many_classes_the_first_ten_are_shown():
    parts = shown([0.5] + [0.005] * 100, [f"class {at}" for at in range(101)])
    assert parts[0:20:2] == [f"class {at}" for at in range(10)]
    assert len(parts) == 21
    assert parts[20].startswith("91 more classes share 45.5 %.")


def test_an_uncertain_model_says_so():
    calibration = Calibration(temperature=1.5, abstain_below=0.8, coverage=0.9)
    flag, *rest = shown([0.7, 0.3], ["cat", "dog"], calibration)
    assert (
        flag
        == "Not sure: the highest probability is below 80.0 %, which 90.0 % of the validation images reached."
    )
    assert rest[-1] == "Probabilities after temperature 1.5."
    assert shown([0.8, 0.2], ["cat", "dog"], calibration)[0] == "cat"


def test_a_model_without_calibration_says_so_and_is_never_uncertain():
    assert shown([0.5, 0.5], ["cat", "dog"]) == [
        *("cat", "50.0 %", "dog", "50.0 %"),
        "These probabilities were not calibrated.",
    ]


def test_an_image_that_looks_foreign_gets_a_warning_and_others_a_note():
    words = "of the held-out images of known classes look more like the labeled ones."
    page = demo_page.show(np.array([0.9, 0.1]), ["cat", "dog"], None, foreign=0.96)
    assert Text(page).parts[0] == f"Maybe none of these classes: 96.0 % {words}"
    page = demo_page.show(np.array([0.9, 0.1]), ["cat", "dog"], None, foreign=0.25, medical=True)
    end = "For research only: not a medical device."
    assert Text(page).parts[-1] == f"These probabilities were not calibrated. 25.0 % {words} {end}"


def test_names_of_classes_stay_text():
    page = Text(demo_page.show(np.full(len(HOSTILE), 0.1), HOSTILE, None))
    assert page.tags == {"table", "tr", "td", "div", "p"}
    assert page.attributes == {"class", "style"}
    assert page.parts[0:20:2] == HOSTILE


def save_model(folder: Path, names: list[str], **config) -> Path:
    model = tiny_vit()
    model.config.id2label, model.config.label2id = (
        dict(enumerate(names)),
        {name: at for at, name in enumerate(names)},
    )
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), ["cat", "dog", HOSTILE[1]])


@pytest.fixture(scope="module")
def classifier(model_folder):
    return Classifier(model_folder)


def test_an_image_is_shown_upright(classifier, tmp_path):
    red_on_top = Image.new("RGB", (30, 20))
    red_on_top.paste((255, 0, 0), (0, 0, 30, 10))
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned: the top of the scene is on the left of the file
    red_on_top.rotate(90, expand=True).save(tmp_path / "turned.png", exif=turned)
    image, _ = demo_page.classify(classifier, str(tmp_path / "turned.png"))
    assert image.size == (360, 240)
    assert (image.getpixel((180, 10)), image.getpixel((180, 230))) == ((255, 0, 0), (0, 0, 0))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_a_file_of_any_mode_is_classified_and_shown(mode, classifier, tmp_path):
    path = tmp_path / "image.tif"
    Image.new(mode, (12, 9)).save(path)
    image, result = demo_page.classify(classifier, str(path))
    assert image.mode in ("L", "RGB")
    assert set(Text(result).parts) > {"cat", "dog", HOSTILE[1]}


def test_a_large_image_is_sent_back_smaller(classifier, tmp_path):
    Image.new("L", (5000, 100)).save(tmp_path / "wide.png")
    assert demo_page.classify(classifier, str(tmp_path / "wide.png"))[0].size == (1024, 20)


def no_image(path: Path) -> None:
    path.write_text("<svg onload='alert(1)'/>")


def cut_off(path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (no_image, "This file cannot be classified: it is no image of a known format."),
        (Path.touch, "This file cannot be classified: it is empty."),
        (cut_off, "This file cannot be classified: "),
        (lambda path: Image.new("1", (10_000, 10_000)).save(path), "it has more than 89,478,485 pixels"),
    ],
    ids=["no image", "empty", "cut off", "too large"],
)
def test_a_file_that_cannot_be_read_gets_a_sentence(write, sentence, classifier, tmp_path):
    path = tmp_path / "image.png"
    write(path)
    image, result = demo_page.classify(classifier, str(path))
    assert image is None
    assert sentence in "".join(Text(result).parts)
    assert str(tmp_path) not in result


# ---- the page, served


class Page:
    """The page of a model on a port of its own, and what it tried to reach elsewhere."""

    def __init__(self, blocks, folder: Path) -> None:
        self.blocks, self.folder, self.reached = blocks, folder, []

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"{self.blocks.local_url}{path}", timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def post(self, path: str, body: bytes, kind: str) -> dict | list:
        request = urllib.request.Request(f"{self.blocks.local_url}{path}", body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def upload(self, content: bytes, name: str = "image.png") -> str:
        head = f'--end\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        body = head.encode() + content + b"\r\n--end--\r\n"
        return self.post("gradio_api/upload", body, "multipart/form-data; boundary=end")[0]

    def classify(self, path: str) -> dict:
        """What the browser does after an upload."""
        session = uuid.uuid4().hex
        data = {"path": path, "meta": {"_type": "gradio.FileData"}}
        event = {"fn_index": 0, "data": [data], "session_hash": session}
        self.post("gradio_api/queue/join", json.dumps(event).encode(), "application/json")
        _, stream = self.get(f"gradio_api/queue/data?session_hash={session}")
        messages = [json.loads(line.removeprefix("data: ")) for line in stream.decode().splitlines() if line]
        return next(message for message in messages if message["msg"] == "process_completed")


def watch_network(patch: pytest.MonkeyPatch, reached: list) -> None:
    """Names looked up and addresses connected to, other than this machine's, are noted and refused."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def watched_connect(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1"):
            reached.append(address)
            raise OSError("no network")
        return connect(self, address)

    def watched_look_up(host, *args, **kwargs):
        if host not in (None, "127.0.0.1", "localhost"):
            reached.append(host)
            raise socket.gaierror("no network")
        return look_up(host, *args, **kwargs)

    patch.setattr(socket.socket, "connect", watched_connect)
    patch.setattr(socket, "getaddrinfo", watched_look_up)


@pytest.fixture(scope="module")
def page(model_folder, classifier, tmp_path_factory):
    if importlib.util.find_spec("gradio") is None:  # not imported yet: it reads the environment
        pytest.skip('needs Gradio: pip install "hf_fixastep[demo]"')
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.setattr(demo_page, "UPLOADS_KEPT", (1, 2))
        patch.chdir(tmp_path_factory.mktemp("here"))
        # settings that some other page may need
        os.environ |= {
            "GRADIO_ALLOWED_PATHS": "/",
            "GRADIO_SHARE": "True",
            "GRADIO_ANALYTICS_ENABLED": "True",
        }
        os.environ |= {"HTTP_PROXY": "http://proxy.invalid:1", "GRADIO_SERVER_NAME": "0.0.0.0"}
        reached: list = []
        watch_network(patch, reached)
        with demo_page.private_gradio() as gradio:
            blocks = demo_page.build_page(
                gradio, HOSTILE[0], lambda path: demo_page.classify(classifier, path)
            )
            demo_page.serve(blocks, "127.0.0.1", None)
            found = Page(blocks, Path(os.environ["GRADIO_TEMP_DIR"]))
            found.reached = reached
            yield found
            blocks.close(verbose=False)
        assert not found.folder.exists()


@pytest.fixture
def picture() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray((np.arange(64, dtype=np.uint8) * 4).reshape(8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def test_an_uploaded_image_is_classified(page, picture, classifier, tmp_path):
    answer = page.classify(page.upload(picture))
    image, result = answer["output"]["data"]
    (tmp_path / "same.png").write_bytes(picture)
    expected = demo_page.classify(classifier, str(tmp_path / "same.png"))[1]
    number = re.compile(r"\d+\.\d+")  # of another thread, which may round a last digit otherwise
    assert number.sub("", result) == number.sub("", expected)
    assert [*map(float, number.findall(result))] == pytest.approx(
        [*map(float, number.findall(expected))], abs=0.11
    )
    status, sent = page.get(f"gradio_api/file={image['path']}")
    assert status == 200
    assert Image.open(io.BytesIO(sent)).size == (360, 360)


def test_a_file_of_the_machine_cannot_be_read_through_the_page(page, picture, model_folder, tmp_path):
    (tmp_path / "private.png").write_bytes(picture)
    Path("here.png").write_bytes(picture)
    cached = Path(".gradio/cached_examples/image.png")  # which Gradio would serve
    cached.parent.mkdir(parents=True)
    cached.write_bytes(picture)
    files = [
        tmp_path / "private.png",
        Path("here.png").resolve(),
        cached.resolve(),
        model_folder / "config.json",
    ]
    for file in [*files, demo_page.__file__, "/etc/passwd"]:
        assert page.get(f"gradio_api/file={file}")[0] == 403
    outside = page.classify(str(tmp_path / "private.png"))
    assert not outside["success"]
    assert "data" not in outside["output"]


def test_uploads_are_deleted(page, picture):
    upload = Path(page.upload(picture, "patient.png"))
    assert page.folder in upload.parents
    assert upload.exists()
    deadline = time.monotonic() + 20
    while upload.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not upload.exists()


def test_nobody_else_can_read_the_uploads(page):
    assert page.folder.stat().st_mode & 0o077 == 0


def test_the_page_is_for_this_machine_and_keeps_no_history(page):
    assert page.blocks.local_url.startswith("http://127.0.0.1:")
    assert page.blocks.share_url is None
    config = json.loads(page.get("config")[1])
    assert not config["analytics_enabled"]
    assert not config["run_history"]
    assert page.get("gradio_api/runs")[0] == 404


def ask(page, method: str, host: str, origin: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(page.blocks.local_url.removeprefix("http://").rstrip("/"))
    port = connection.port
    headers = {"Host": f"{host}:{port}", "Origin": f"http://{origin}:{port}"}
    headers |= {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
    connection.request(method, "/config", headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_names_of_this_machine_are_answered(page, host, method):
    answer, content = ask(page, method, host, host)
    assert answer.status == 200
    assert (b"components" in content) == (method == "GET")


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example", "evil.example"),
        ("evil.example", "localhost"),
        ("localhost", "evil.example"),
        ("[::1]", "evil.example"),
        ("localhost", "["),
    ],
)
def test_other_names_and_origins_are_refused(page, host, origin, method):
    """Else a page of the internet could call itself by its own name here."""
    answer, content = ask(page, method, host, origin)
    assert answer.status == 400
    assert answer.getheader("Access-Control-Allow-Origin") is None
    assert b"components" not in content


def test_the_title_stays_text(page):
    _, source = page.get("")
    assert HOSTILE[0] not in source.decode()
    titles = [
        part["props"]["value"]
        for part in page.blocks.config["components"]
        if part["props"].get("elem_id") == "title"
    ]
    assert titles == ["<h1>&lt;script&gt;alert(1)&lt;/script&gt;</h1>"]


def test_nothing_outside_this_machine_was_asked_for(page, picture):
    page.classify(page.upload(picture))
    assert page.reached == []


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "The first argument has to be a model"),
        (["--port", "7860"], "The first argument has to be a model"),
        (["nowhere"], "There is no folder nowhere"),
        (["MODEL", "--prot", "7860"], "Unknown argument 'prot'. Did you mean port?"),
        (["MODEL", "--port", "70000"], "The page cannot be at 127.0.0.1:70000"),
        (["MODEL", "--host", "256.0.0.1"], "The page cannot be at 256.0.0.1:7860"),
        (["MODEL", "--revision", "v1"], "which has no revisions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_sentence(argv, sentence, model_folder, monkeypatch):
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        demo.main([str(model_folder) if word == "MODEL" else word for word in argv])
    assert "\n" not in str(stopped.value)


def test_a_taken_port_is_said(model_folder, monkeypatch):
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SystemExit, match="give another --host or --port"),
    ):
        demo.main([str(model_folder), "--port", str(taken.getsockname()[1])])


def test_without_gradio_the_command_to_install_it_is_given(model_folder, monkeypatch):
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with mock.patch.dict(os.environ), pytest.raises(SystemExit, match=r'pip install "hf_fixastep\[demo\]"'):
        demo.main([str(model_folder)])
