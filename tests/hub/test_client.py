"""The loopback Hub and the real clients: what they do, and what they do when it fails."""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from hf_fixastep import export_dataset
from tests.hub.server import HOST, OTHER_HOST, File, HubServer, Outcome, Python, check_card
from tests.short_runs import tiny_processor, tiny_vit, tiny_wide_resnet


WEIGHTS = bytes(range(256)) * 400
LOCK = f"{hashlib.sha256(WEIGHTS).hexdigest()}.lock"
CARD = b"---\nlicense: mit\n---\n# A model\n"
# Retries are counted, not waited for: `waits` holds the seconds that the client wanted to sleep.
CLIENT = """
from types import SimpleNamespace
from huggingface_hub import *
from huggingface_hub import HfApi, HfFileSystem, file_download
from huggingface_hub.utils import _http
waits = []
_http.time = file_download.time = SimpleNamespace(sleep=waits.append)
api = HfApi()
"""
PUSH = """
create_repo({name!r}, exist_ok=True)
result = upload_folder(repo_id={name!r}, folder_path={folder!r}).oid
"""
PULL = "result = hf_hub_download({name!r}, 'model.safetensors', cache_dir={cache!r})"
PUSH_ENDPOINTS = ["create", "yaml", "preupload", "batch", "upload", "verify", "commit"]
# 409 to "create" means that the repo exists
REFUSALS = [(e, s) for e in PUSH_ENDPOINTS for s in (401, 403, 404, 409) if (e, s) != ("create", 409)]
RETRIED = ["preupload", "batch", "upload", "verify"]  # the others are asked once


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(server: HubServer) -> HubServer:
    """Without repos, faults and memories of other tests."""
    server.repos.clear()
    server.objects.clear()
    server.requests.clear()
    server.heal()
    return server


@pytest.fixture(scope="module")
def process(server: HubServer, tmp_path_factory) -> Iterator[Python]:
    seconds = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    folder = tmp_path_factory.mktemp("client")
    with Python(server.environment(folder / "home") | seconds, folder / "errors") as python:
        assert not python(CLIENT).errors
        yield python


@pytest.fixture
def python(process: Python) -> Python:
    process("waits.clear()")
    return process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run might leave: text, weights and a figure."""
    folder = tmp_path / "run"
    (folder / "figures").mkdir(parents=True)
    (folder / "README.md").write_bytes(CARD)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    Image.new("RGB", (4, 4), "red").save(folder / "figures/loss.png")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def push(python: Python, folder: Path, name: str = "org/name") -> Outcome:
    return python(PUSH.format(name=name, folder=str(folder)))


def pull(python: Python, cache: Path, name: str = "org/name") -> Outcome:
    return python(PULL.format(name=name, cache=str(cache)))


def waits(python: Python) -> list[float]:
    return python("result = waits").value


def statuses(hub: HubServer, endpoint: str) -> list[int]:
    return [request.status for request in hub.seen(endpoint)]


def pushed(hub: HubServer) -> dict[str, bytes]:
    """What users have put into org/name."""
    return {
        path: data for path, data in hub.repo("model", "org/name").files().items() if path != ".gitattributes"
    }


def assert_a_repeat_completes(hub: HubServer, python: Python, folder: Path) -> None:
    hub.heal()
    outcome = push(python, folder)
    assert not outcome.errors
    assert pushed(hub) == contents(folder)
    assert len(hub.repo("model", "org/name").commits) == 2


class TestPush:
    def test_text_goes_with_the_commit_and_all_else_through_storage(self, hub, python, folder) -> None:
        outcome = push(python, folder)
        repo = hub.repo("model", "org/name")
        assert outcome.value == repo.commits[-1].sha == repo.branches["main"]
        assert pushed(hub) == contents(folder)
        stored = {path for path, file in repo.at("main").tree.items() if file.lfs}
        assert stored == {"model.safetensors", "figures/loss.png"}
        assert [len(hub.seen(endpoint)) for endpoint in ("upload", "verify", "commit")] == [2, 2, 1]

    def test_the_token_goes_everywhere_but_to_storage(self, hub, python, folder) -> None:
        push(python, folder)
        assert {request.endpoint for request in hub.requests if not request.token} == {"upload"}

    def test_what_has_not_changed_is_not_sent_again(self, hub, python, folder) -> None:
        first = push(python, folder).value
        hub.requests.clear()
        assert push(python, folder).value == first
        assert not hub.seen("upload")
        assert not hub.seen("commit")
        assert statuses(hub, "create") == [409]

    def test_a_changed_file_makes_a_commit_of_its_own(self, hub, python, folder) -> None:
        push(python, folder)
        (folder / "config.json").write_text('{"a": 1}')
        push(python, folder)
        repo = hub.repo("model", "org/name")
        assert len(repo.commits) == 3
        assert repo.files(repo.commits[1].sha)["config.json"] == b"{}"
        assert pushed(hub) == contents(folder)

    def test_datasets_have_repos_of_their_own(self, hub, python, folder) -> None:
        code = "create_repo('org/name', repo_type='dataset', private=True)\n"
        code += f"upload_folder(repo_id='org/name', repo_type='dataset', folder_path={str(folder)!r})"
        assert not python(code).errors
        repo = hub.repo("dataset", "org/name")
        assert repo.private
        assert repo.files()["model.safetensors"] == WEIGHTS
        with pytest.raises(KeyError):
            hub.repo("model", "org/name")

    def test_files_can_be_deleted(self, hub, python, folder) -> None:
        push(python, folder)
        python("api.delete_folder('figures', 'org/name')\napi.delete_file('config.json', 'org/name')")
        assert set(pushed(hub)) == {"README.md", "model.safetensors"}
        assert "EntryNotFoundError" in python("api.delete_file('config.json', 'org/name')").errors[0]

    def test_a_commit_on_another_parent_is_refused(self, hub, python, folder) -> None:
        parent = hub.create("model", "org/name").commits[-1].sha
        push(python, folder)
        add = "[CommitOperationAdd('a.txt', b'a')]"
        code = f"create_commit('org/name', {add}, commit_message='a', parent_commit={parent!r})"
        assert "412" in python(code).errors[0]
        assert "a.txt" not in pushed(hub)

    @pytest.mark.parametrize(
        "path", ["../up.txt", "a/../../up.txt", "/root.txt", ".git/config", "\\u2028\\r\\nA: b/.."]
    )
    def test_no_path_leads_out_of_the_repo(self, hub, path: str) -> None:
        hub.create("model", "org/name")
        connection = http.client.HTTPConnection(HOST, hub.port, timeout=5)
        body = '{"key": "header", "value": {"summary": "s"}}\n'
        body += f'{{"key": "file", "value": {{"path": "{path}", "content": "", "encoding": "base64"}}}}\n'
        headers = {"Authorization": f"Bearer {hub.token}"}
        connection.request("POST", "/api/models/org/name/commit/main", body, headers)
        assert connection.getresponse().status == 400
        assert not pushed(hub)

    def test_a_broken_card_is_refused_before_anything_is_sent(self, hub, python, folder) -> None:
        (folder / "README.md").write_text("---\nlicense: [mit\n---\n")
        outcome = push(python, folder)
        assert outcome.errors[0].startswith("ValueError: Invalid metadata in README.md.")
        assert not hub.seen("upload")
        assert not pushed(hub)

    @pytest.mark.parametrize(
        ("namespace", "token", "message"),
        [
            (
                "elsewhere",
                "None",
                "403 Forbidden: You don't have the rights to write to the namespace 'elsewhere'",
            ),
            ("org", "'hf_wrong'", "401 Unauthorized"),
            ("org", "False", "401 Unauthorized"),
        ],
    )
    def test_who_may_not_write_is_told(self, hub, python, namespace: str, token: str, message: str) -> None:
        assert message in python(f"create_repo('{namespace}/name', token={token})").errors[0]
        assert not hub.repos


class TestPull:
    def test_a_snapshot_holds_every_file(self, hub, python, folder, tmp_path) -> None:
        push(python, folder)
        outcome = python(f"result = snapshot_download('org/name', cache_dir={str(tmp_path / 'cache')!r})")
        assert contents(Path(outcome.value)) == hub.repo("model", "org/name").files()

    def test_a_branch_a_tag_and_a_commit_are_revisions(self, hub, python, folder) -> None:
        first = push(python, folder).value
        python("create_tag('org/name', tag='v1')\ncreate_branch('org/name', branch='try/this')")
        (folder / "config.json").write_text('{"a": 1}')
        push(python, folder)
        code = "result = open(hf_hub_download('org/name', 'config.json', revision={!r})).read()"
        for revision in ("v1", "try/this", first):
            assert python(code.format(revision)).value == "{}"
        assert python(code.format("main")).value == '{"a": 1}'
        assert "RevisionNotFoundError" in python(code.format("v2")).errors[0]
        refs = python(
            "r = list_repo_refs('org/name')\nresult = [[b.name for b in r.branches], [t.name for t in r.tags]]"
        )
        assert refs.value == [["main", "try/this"], ["v1"]]

    def test_the_api_tells_what_is_there(self, hub, python, folder) -> None:
        push(python, folder)
        tree = hub.repo("model", "org/name").at("main").tree
        code = "result = [[f.path, f.size, f.blob_id, f.lfs and f.lfs.sha256] for f in {}]"
        expected = [[p, len(f.data), f.oid, f.sha256 if f.lfs else None] for p, f in sorted(tree.items())]
        listed = python(code.format("list_repo_tree('org/name', recursive=True) if hasattr(f, 'size')"))
        assert sorted(listed.value) == expected
        paths = python(code.format("get_paths_info('org/name', ['README.md', 'absent'])"))
        assert paths.value == [entry for entry in expected if entry[0] == "README.md"]
        top = python("result = [f.path for f in list_repo_tree('org/name')]").value
        assert set(top) == {".gitattributes", "README.md", "config.json", "figures", "model.safetensors"}
        assert (
            python("result = [c.title for c in list_repo_commits('org/name')]").value[-1] == "initial commit"
        )
        assert (
            python("result = model_info('org/name').sha").value
            == hub.repo("model", "org/name").commits[-1].sha
        )
        assert python("result = [whoami()['name'], *[o['name'] for o in whoami()['orgs']]]").value == [
            "tester",
            "org",
        ]

    def test_the_names_are_those_of_git(self, hub) -> None:
        """`git hash-object` of "{}" and of the pointer, worked out on the command line."""
        hub.create("model", "org/name", {"config.json": b"{}", "model.safetensors": b"abc"})
        tree = hub.repo("model", "org/name").at("main").tree
        assert tree["config.json"].oid == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
        assert tree["model.safetensors"].sha256 == hashlib.sha256(b"abc").hexdigest()
        assert tree["model.safetensors"].oid == "80d7d501c2b256023dc42e46d958b9ac2ec283ee"

    def test_what_is_missing_has_errors_of_its_own(self, hub, python, folder) -> None:
        push(python, folder)
        code = "hf_hub_download({!r}, {!r})"
        assert "RepositoryNotFoundError: 404" in python(code.format("org/absent", "config.json")).errors[0]
        assert "RemoteEntryNotFoundError: 404" in python(code.format("org/name", "absent.json")).errors[0]

    @pytest.mark.parametrize("token", ["False", "'hf_wrong'"])
    def test_a_private_repo_needs_a_token(self, hub, python, tmp_path, token: str) -> None:
        hub.create("model", "org/name", {"config.json": b"{}"}, private=True)
        code = f"hf_hub_download('org/name', 'config.json', cache_dir={str(tmp_path)!r}, token={{}})"
        assert "401" in python(code.format(token)).errors[0]
        assert not list(tmp_path.rglob("config.json"))
        assert not python(code.format("None")).errors

    def test_parts_of_a_file_can_be_read(self, hub, python) -> None:
        hub.create("model", "org/name", {"model.safetensors": WEIGHTS})
        code = "f = HfFileSystem().open('org/name/model.safetensors', block_size=1000)\n"
        code += "f.seek(70_001)\nresult = f.read(300).hex()"
        assert python(code).value == WEIGHTS[70_001:70_301].hex()
        assert 206 in statuses(hub, "download")

    @pytest.mark.parametrize(
        ("wanted", "status", "part", "field"),
        [
            ("bytes=2-4", 206, b"cde", "bytes 2-4/10"),
            ("bytes=7-", 206, b"hij", "bytes 7-9/10"),
            ("bytes=-2", 206, b"ij", "bytes 8-9/10"),
            ("bytes=8-99", 206, b"ij", "bytes 8-9/10"),
            ("bytes=10-", 416, b"", "bytes */10"),
            ("", 200, b"abcdefghij", None),
        ],
    )
    def test_ranges(self, hub, wanted: str, status: int, part: bytes, field: str | None) -> None:
        hub.create("model", "org/name", {"a.txt": b"abcdefghij"})
        connection = http.client.HTTPConnection(HOST, hub.port, timeout=5)
        connection.request("GET", "/org/name/resolve/main/a.txt", headers={"Range": wanted} if wanted else {})
        response = connection.getresponse()
        assert (response.status, response.read(), response.headers["Content-Range"]) == (status, part, field)


class TestPushFaults:
    @pytest.mark.parametrize(("endpoint", "status"), REFUSALS)
    def test_a_refusal_ends_the_push_at_once(self, hub, python, folder, endpoint: str, status: int) -> None:
        before = contents(folder)
        hub.fail(endpoint, status, times=99)
        outcome = push(python, folder)
        assert any(str(status) in error for error in outcome.errors)
        assert set(statuses(hub, endpoint)) == {status}
        assert waits(python) == []
        assert contents(folder) == before
        assert_a_repeat_completes(hub, python, folder)

    @pytest.mark.parametrize("fault", [429, 500, 503, "reset", "lost"])
    @pytest.mark.parametrize("endpoint", RETRIED)
    def test_a_passing_fault_is_overcome(self, hub, python, folder, endpoint: str, fault: int | str) -> None:
        hub.fail(endpoint, fault, times=2, seconds=5)
        assert not push(python, folder).errors
        assert pushed(hub) == contents(folder)
        assert len(hub.repo("model", "org/name").commits) == 2
        played = [request for request in hub.seen(endpoint) if request.status != 200]
        assert len(played) == 2
        waited = waits(python)
        if fault == 429:
            assert waited == [6, 6]  # Retry-After and one second
        else:
            assert sum(waited) in (2, 3)  # 1 + 1 where it hit two files, 1 + 2 where it hit one twice

    @pytest.mark.parametrize("fault", [429, 500, 503, "reset"])
    @pytest.mark.parametrize("endpoint", [e for e in PUSH_ENDPOINTS if e not in RETRIED])
    def test_some_requests_are_made_once(self, hub, python, folder, endpoint: str, fault: int | str) -> None:
        hub.fail(endpoint, fault)
        outcome = push(python, folder)
        assert outcome.errors
        assert [request.status for request in hub.seen(endpoint)] == [fault if isinstance(fault, int) else 0]
        assert waits(python) == []
        assert_a_repeat_completes(hub, python, folder)

    @pytest.mark.parametrize("fault", [429, 500, "reset"])
    def test_retries_end(self, hub, python, folder, fault: int | str) -> None:
        (folder / "figures/loss.png").unlink()
        before = contents(folder)
        hub.fail("upload", fault, times=99, seconds=3)
        outcome = push(python, folder)
        assert outcome.errors[0] == "RuntimeError: Error while uploading 'model.safetensors' to the Hub."
        assert len(hub.seen("upload")) == 6
        assert waits(python) == ([4] * 5 if fault == 429 else [1, 2, 4, 8, 8])
        assert contents(folder) == before
        assert not pushed(hub)
        assert_a_repeat_completes(hub, python, folder)

    def test_a_commit_whose_answer_is_lost_is_not_made_twice(self, hub, python, folder) -> None:
        hub.fail("commit", "lost")
        assert push(python, folder).errors[0].startswith("ReadError")
        assert pushed(hub) == contents(folder)
        assert_a_repeat_completes(hub, python, folder)

    def test_weights_damaged_on_the_way_are_refused(self, hub, python, folder) -> None:
        hub.fail("upload", "corrupt", times=99)
        outcome = push(python, folder)
        assert any("BadRequestError: Bad request:\nThe sha256" in error for error in outcome.errors)
        assert not hub.objects
        assert not pushed(hub)
        assert_a_repeat_completes(hub, python, folder)

    @pytest.mark.parametrize("endpoint", PUSH_ENDPOINTS)
    def test_no_token_goes_to_another_host(self, hub, python, folder, endpoint: str) -> None:
        hub.fail(endpoint, "redirect", times=99)
        outcome = push(python, folder)
        elsewhere = [request for request in hub.requests if request.host == OTHER_HOST]
        assert elsewhere
        assert not any(request.token for request in elsewhere)
        # checking a card needs no token, so that only this one goes on over there
        assert bool(outcome.errors) == (endpoint != "yaml")
        hub.heal()
        assert_a_repeat_completes(hub, python, folder)


class TestPullFaults:
    @pytest.fixture
    def repo(self, hub):
        return hub.create("model", "org/name", {"model.safetensors": WEIGHTS}, private=True)

    def weights(self, outcome: Outcome) -> bytes:
        assert not outcome.errors
        return Path(outcome.value).read_bytes()

    @pytest.mark.parametrize("fault", [401, 403, 404, 409, 500, 503, "reset"])
    @pytest.mark.parametrize("endpoint", ["head", "download"])
    def test_a_failed_pull_leaves_no_file(
        self, hub, repo, python, tmp_path, endpoint: str, fault: int | str
    ) -> None:
        hub.fail(endpoint, fault, times=99)
        outcome = pull(python, tmp_path)
        assert any(str(fault) in error for error in outcome.errors)
        # Once for a quick look into the cache, then 6 times.
        patient = endpoint == "head" and fault in (500, 503)
        assert len(hub.seen(endpoint)) == (7 if patient else 1)
        assert waits(python) == ([1, 2, 4, 8, 8] if patient else [])
        assert not {path.name for path in tmp_path.rglob("*") if path.is_file()} - {
            "CACHEDIR.TAG",
            "main",
            LOCK,
        }
        hub.heal()
        assert self.weights(pull(python, tmp_path)) == WEIGHTS

    def test_retry_after_is_kept(self, hub, repo, python, tmp_path) -> None:
        hub.fail("download", 429, times=2, seconds=5)
        assert self.weights(pull(python, tmp_path)) == WEIGHTS
        assert waits(python) == [6, 6]

    def test_a_failed_pull_leaves_the_old_version(self, hub, repo, python, tmp_path) -> None:
        old = pull(python, tmp_path).value
        repo.add({"model.safetensors": File(WEIGHTS[::-1], lfs=True)}, "Train longer")
        hub.fail("download", "reset", times=99)
        assert pull(python, tmp_path).errors
        assert Path(old).read_bytes() == WEIGHTS
        hub.heal()
        assert self.weights(pull(python, tmp_path)) == WEIGHTS[::-1]
        assert Path(old).read_bytes() == WEIGHTS

    def test_a_slow_body_is_waited_for(self, hub, repo, python, tmp_path) -> None:
        hub.fail("download", "drip", seconds=0.1)
        outcome = pull(python, tmp_path)
        assert self.weights(outcome) == WEIGHTS
        assert outcome.seconds > 0.5

    def test_a_body_that_stops_is_asked_for_again(self, hub, repo, python, tmp_path) -> None:
        hub.fail("download", "drip", seconds=1.5)  # the client waits 1 second here
        outcome = pull(python, tmp_path)
        assert self.weights(outcome) == WEIGHTS
        assert len(hub.seen("download")) == 2
        assert waits(python) == [1]

    def test_the_client_does_not_notice_a_wrong_hash_but_can_be_asked(
        self, hub, repo, python, tmp_path
    ) -> None:
        hub.fail("download", "corrupt")
        damaged = self.weights(pull(python, tmp_path))
        assert len(damaged) == len(WEIGHTS)
        assert damaged != WEIGHTS
        check = f"v = api.verify_repo_checksums('org/name', cache_dir={str(tmp_path)!r})\n"
        found = python(check + "result = [[m['path'], m['expected']] for m in v.mismatches]")
        assert found.value == [["model.safetensors", hashlib.sha256(WEIGHTS).hexdigest()]]
        code = f"hf_hub_download('org/name', 'model.safetensors', cache_dir={str(tmp_path)!r}, force_download=True)"
        assert self.weights(python(f"result = {code}")) == WEIGHTS

    @pytest.mark.parametrize("endpoint", ["head", "download"])
    def test_no_token_goes_to_another_host(self, hub, repo, python, tmp_path, endpoint: str) -> None:
        hub.fail(endpoint, "redirect")
        assert self.weights(pull(python, tmp_path)) == WEIGHTS
        assert [
            (request.endpoint, request.token) for request in hub.requests if request.host == OTHER_HOST
        ] == [("download", False)]


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def networks() -> dict[str, PreTrainedModel]:
    networks = {"vit": tiny_vit(), "vit-later": tiny_vit(seed=1), "wide": tiny_wide_resnet()}
    for network in networks.values():
        network.eval()
        network.config.id2label = {0: "cat", 1: "dog", 2: "owl"}
        network.config.label2id = {"cat": 0, "dog": 1, "owl": 2}
    return networks


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    return export_dataset("digits_open_set", "zeta50", folder / "digits", cache_dir=folder / "cache")


@pytest.fixture(scope="module")
def filled(networks, export, tmp_path_factory) -> Iterator[HubServer]:
    """A Hub with a ViT that was trained on after "v1", a Wide ResNet, both private, and a data set."""
    with HubServer() as hub:
        files = {}
        for name, network in networks.items():
            folder = tmp_path_factory.mktemp(name)
            network.save_pretrained(folder)
            tiny_processor().save_pretrained(folder)
            files[name] = contents(folder)
        repo = hub.create("model", "org/vit", files["vit"], private=True)
        repo.tags["v1"] = repo.branches["main"]
        weights = File(files["vit-later"]["model.safetensors"], lfs=True)
        repo.add({**repo.at("main").tree, "model.safetensors": weights}, "Train longer")
        hub.create("model", "org/wide", files["wide"], private=True)
        hub.create("dataset", "org/digits", contents(export))
        yield hub


@pytest.fixture(scope="module")
def reader(filled, tmp_path_factory) -> Iterator[Python]:
    """A process with empty caches that has not imported our package."""
    folder = tmp_path_factory.mktemp("reader")
    code = """
        import datasets, numpy, PIL.Image, sys, torch
        from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

        def logits(*names, **settings):
            with torch.no_grad():
                network = AutoModelForImageClassification.from_pretrained(*names, **settings)
                return network(torch.arange(192.0).view(1, 3, 8, 8) / 192).logits.tolist()

        def rows(*names, **settings):
            dataset = datasets.load_dataset(*names, **settings)
            return [[row["label"], numpy.array(row["image"]).tolist()] for row in dataset]
    """
    with Python(filled.environment(folder / "home"), folder / "errors") as python:
        assert not python(code).errors
        yield python


def logits(network: PreTrainedModel) -> list:
    """Of the image that the reader looks at."""
    with torch.no_grad():
        return network(torch.arange(192.0).view(1, 3, 8, 8) / 192).logits.tolist()


def rows(export: Path, split: str) -> list:
    """Label and pixels of every row, straight from the folder."""
    (file,) = export.rglob(f"{split}*.parquet")
    dataset = datasets.Dataset.from_parquet(str(file), cache_dir=str(export.parent / "plain"))
    return [[row["label"], np.array(row["image"]).tolist()] for row in dataset]


class TestTransformers:
    """In this order: the package is imported on the way."""

    def test_a_library_network_comes_back_without_our_package(self, reader, networks) -> None:
        assert reader("result = logits('org/vit')").value == logits(networks["vit-later"])
        assert reader("result = 'hf_fixastep' in sys.modules").value is False

    def test_a_pinned_revision_comes_back(self, filled, reader, networks) -> None:
        for revision in ("v1", filled.repo("model", "org/vit").tags["v1"]):
            assert reader(f"result = logits('org/vit', revision={revision!r})").value == logits(
                networks["vit"]
            )

    def test_the_pipeline_gives_the_probabilities_of_the_normalized_image(
        self, reader, networks, pixels
    ) -> None:
        outcome = reader(f"""
            image = PIL.Image.fromarray(numpy.array({pixels.tolist()}, dtype="uint8"))
            scores = pipeline("image-classification", model="org/vit")(image, top_k=3)
            result = {{score["label"]: score["score"] for score in scores}}
        """)
        x = torch.tensor((pixels / 255 - 0.5) / 0.25, dtype=torch.float32).permute(2, 0, 1)[None]
        with torch.no_grad():
            probabilities = networks["vit-later"](x).logits.softmax(-1)[0].tolist()
        assert outcome.value == pytest.approx(
            dict(zip(["cat", "dog", "owl"], probabilities, strict=True)), abs=1e-5
        )

    def test_nobody_may_pull_a_private_network(self, reader, tmp_path) -> None:
        outcome = reader(f"logits('org/vit', token=False, cache_dir={str(tmp_path)!r})")
        assert outcome.errors[0].startswith(
            "OSError: org/vit is not a local folder and is not a valid model identifier"
        )

    @pytest.mark.parametrize("fault", [401, 403, 404, 500, "reset"])
    def test_a_failed_pull_is_an_os_error(self, filled, reader, networks, tmp_path, fault: int | str) -> None:
        code = f"result = logits('org/vit', cache_dir={str(tmp_path)!r})"
        filled.fail("download", fault, path="model.safetensors")
        assert reader(code).errors[0].startswith("OSError")
        assert reader(code).value == logits(networks["vit-later"])

    def test_our_network_comes_back_once_our_package_is_imported(self, reader, networks) -> None:
        assert "wide_resnet_fixastep" in reader("logits('org/wide')").errors[0]
        assert not reader("import hf_fixastep").errors
        assert reader("result = logits('org/wide')").value == logits(networks["wide"])

    @pytest.mark.parametrize(("name", "network"), [("vit", "vit-later"), ("wide", "wide")])
    def test_push_to_hub_sends_what_a_pull_needs(
        self, filled, reader, networks, tmp_path, name, network
    ) -> None:
        outcome = reader(f"""
            import hf_fixastep
            network = AutoModelForImageClassification.from_pretrained("org/{name}")
            network.push_to_hub("org/{name}-again", private=True)
            AutoImageProcessor.from_pretrained("org/{name}").push_to_hub("org/{name}-again")
            result = logits("org/{name}-again", cache_dir={str(tmp_path)!r})
        """)
        assert outcome.value == logits(networks[network])
        repo = filled.repo("model", f"org/{name}-again")
        assert repo.private
        expected = {
            "README.md",
            "config.json",
            "model.safetensors",
            "preprocessor_config.json",
            ".gitattributes",
        }
        assert set(repo.files()) == expected


class TestDatasets:
    def test_an_exported_set_loads_by_name(self, reader, export) -> None:
        outcome = reader("result = rows('org/digits', 'zeta50', split='test')")
        assert outcome.value == rows(export, "test")

    def test_an_exported_set_streams(self, filled, reader, export) -> None:
        filled.requests.clear()
        outcome = reader("result = rows('org/digits', 'zeta50', split='labeled', streaming=True)")
        assert outcome.value == rows(export, "labeled")
        assert {request.status for request in filled.seen("download", ".parquet")} == {206}

    def test_streaming_sends_no_token_to_another_host(self, filled, reader, export) -> None:
        filled.requests.clear()
        filled.fail("download", "redirect", times=99, path=".parquet")
        outcome = reader("result = rows('org/digits', 'zeta50', split='labeled', streaming=True)")
        filled.heal()
        assert outcome.value == rows(export, "labeled")
        elsewhere = [request for request in filled.requests if request.host == OTHER_HOST]
        assert elsewhere
        assert not any(request.token for request in elsewhere)

    def test_a_damaged_file_stays_in_the_cache_until_it_is_asked_for_again(
        self, filled, reader, export
    ) -> None:
        filled.create("dataset", "org/damaged", contents(export))
        filled.fail("download", "corrupt", path="test.parquet")
        code = "result = rows('org/damaged', 'zeta50', split='test', download_mode={!r})"
        for _ in range(2):
            assert (
                "Parquet magic bytes not found" in reader(code.format("reuse_dataset_if_exists")).errors[-1]
            )
        assert reader(code.format("force_redownload")).value == rows(export, "test")

    def test_pushed_configurations_are_kept_apart(self, filled, reader, export) -> None:
        pushed = reader("""
            dataset = datasets.load_dataset("org/digits", "zeta50", split="test")
            for name, count in {"few": 3, "more": 5}.items():
                datasets.DatasetDict({"test": dataset.select(range(count))}).push_to_hub("org/rows", config_name=name)
        """)
        assert not pushed.errors
        code = "result = datasets.get_dataset_config_names('org/rows', revision={!r})"
        assert reader(code.format("main")).value == ["few", "more"]
        assert reader(code.format(filled.repo("dataset", "org/rows").commits[1].sha)).value == ["few"]
        for name, count in {"few": 3, "more": 5}.items():
            found = reader(f"result = rows('org/rows', {name!r}, split='test')").value
            assert found == rows(export, "test")[:count]


@pytest.mark.slow
class TestRealTime:
    """The same faults with the client's own waits."""

    @pytest.fixture
    def python(self, server, tmp_path) -> Iterator[Python]:
        with Python(server.environment(tmp_path / "home")) as python:
            assert not python("from huggingface_hub import create_repo, upload_folder").errors
            yield python

    def test_retries_end_after_half_a_minute(self, hub, python, folder) -> None:
        hub.fail("upload", 500, times=99, path=hashlib.sha256(WEIGHTS).hexdigest())
        outcome = push(python, folder)
        assert outcome.errors
        assert 23 <= outcome.seconds < 30
        assert_a_repeat_completes(hub, python, folder)

    def test_retry_after_is_waited_for(self, hub, python, folder) -> None:
        hub.fail("preupload", 429, seconds=2)
        outcome = push(python, folder)
        assert not outcome.errors
        assert 3 <= outcome.seconds < 5

    def test_the_client_waits_for_any_answer_without_end(self, hub, python, folder) -> None:
        """Whoever wants a bound must set one: requests other than downloads have no timeout."""
        hub.fail("commit", "drip", seconds=12)
        outcome = push(python, folder)
        assert not outcome.errors
        assert outcome.seconds > 60


@pytest.mark.parametrize(
    ("text", "errors", "warnings"),
    [
        ("---\nlicense: mit\n---\n# A", 0, 0),
        ("# A", 0, 1),
        ("---\nlicense: [mit\n---\n", 1, 0),
        ("---\n- a\n- b\n---\n", 1, 0),
        ("---\nmodel-index: 1\n---\n", 1, 0),
        ("---\nmodel-index:\n- name: a\n  results:\n  - task: {type: t}\n---\n", 4, 0),
    ],
)
def test_cards_are_checked(text: str, errors: int, warnings: int) -> None:
    assert [len(found) for found in check_card(text)] == [errors, warnings]


@pytest.mark.parametrize(("endpoint", "fault"), [("uplaod", 500), ("upload", "rest")])
def test_a_misspelt_fault_is_an_error(hub, endpoint: str, fault: int | str) -> None:
    with pytest.raises(ValueError, match="Unknown"):
        hub.fail(endpoint, fault)
