"""A small Hub on the loopback interface, in memory, for the real clients.

    with HubServer() as hub:
        environment = hub.environment(tmp_path / "home")  # empty caches, a token, this server as HF_ENDPOINT
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        repo = hub.repo("model", "org/name")  # KeyError where there is none; the other kind is dataset
        repo.files()["config.json"]  # bytes on main; files("v1") at a branch or commit
        repo.commits[-1].message  # oldest first; the first one is the Hub's own

The token belongs to a user "tester" who may write to the namespaces "tester" and "org"; another namespace is
403, a wrong token 401, a private repo without a token 401. `hub.create("dataset", "org/data", {"README.md":
b"..."})` fills a repo without a client.

Faults, each for the next `times` requests to an endpoint of ROUTES (whose path contains `path`), in the order
given; `hub.heal()` forgets those that are left:

    hub.fail("upload", 500, times=2)  # any status
    hub.fail("preupload", 429, seconds=1)  # with Retry-After
    hub.fail("upload", "reset")  # the connection, in the middle of the body; nothing is done
    hub.fail("commit", "lost")  # done, but the connection breaks before the answer
    hub.fail("download", "drip", seconds=0.5)  # the reply in 5 pieces, a pause before each
    hub.fail("create", "endless")  # headers without end, ten a second
    hub.fail("download", "corrupt", path="model.")  # one byte changed, on the way down or up
    hub.fail("download", "redirect")  # to OTHER_HOST, where the same server listens and nothing fails

`hub.requests` holds every request: endpoint, method, path, host it came to, whether it brought a token, and
the status sent (0 for a reset). `hub.seen("upload")` gives those of one endpoint.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


sleep = time.sleep  # which tests make shorter for the client
HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"
USER, NAMESPACES = "tester", ("tester", "org")
KINDS = {"models": "model", "datasets": "dataset"}
LFS_SUFFIXES = (".arrow", ".bin", ".npz", ".parquet", ".pt", ".pth", ".safetensors", ".zip")
NOW = "2026-01-01T00:00:00.000Z"

API = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
REPO = r"/(?:(?P<kind>datasets)/)?(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
# What huggingface_hub 2.4, transformers 5.22 and datasets 5.2 ask for: endpoint, method, path.
ROUTES = [
    ("yaml", "POST", "/api/validate-yaml"),
    ("create", "POST", "/api/repos/create"),
    ("info", "GET", f"{API}(?:/revision/{REVISION})?"),
    ("tree", "GET", f"{API}/tree/{REVISION}(?:/(?P<path>.+))?"),
    ("paths", "POST", f"{API}/paths-info/{REVISION}"),
    ("branch", "POST", f"{API}/branch/(?P<branch>[^/]+)"),
    ("preupload", "POST", f"{API}/preupload/{REVISION}"),
    ("batch", "POST", f"{REPO}\\.git/info/lfs/objects/batch"),
    ("upload", "PUT", "/lfs/(?P<sha256>[0-9a-f]{64})"),
    ("verify", "POST", f"{REPO}\\.git/info/lfs/objects/verify"),
    ("commit", "POST", f"{API}/commit/{REVISION}"),
    ("head", "HEAD", f"{REPO}/resolve/{REVISION}/(?P<path>.+)"),
    ("download", "GET", f"{REPO}/resolve/{REVISION}/(?P<path>.+)"),
]
FAULTS = ("reset", "lost", "drip", "endless", "corrupt", "redirect")
# What the Hub says with a status, where the client makes something of it: message, code.
PLAYED = {
    401: ("Invalid credentials in Authorization header", ""),
    404: ("Repository not found", "RepoNotFound"),
    409: ("Cannot create repo: another conflicting operation is in progress", ""),
}
WRITES = {"create", "branch", "preupload", "batch", "verify", "commit"}


class HubError(Exception):
    """An answer that is no success.

    Args:
        code: by which the client tells its errors apart.
        body: what the answer holds besides the message.
    """

    def __init__(self, status: int, message: str, code: str = "", body: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message} | (body or {})


@dataclass(frozen=True)
class File:
    data: bytes
    lfs: bool

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @functools.cached_property
    def oid(self) -> str:
        """The name git gives to the content, or to the pointer that stands for it."""
        size = len(self.data)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n"
        content = pointer.encode() if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    def entry(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "oid": self.oid, "size": len(self.data)}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 134}
        return entry


@dataclass(frozen=True)
class Commit:
    sha: str
    message: str
    tree: dict[str, File]


@dataclass
class Repo:
    kind: str
    name: str
    private: bool = False
    commits: list[Commit] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: file.data for path, file in self.at(revision).tree.items()}

    def at(self, revision: str) -> Commit:
        sha = self.branches.get(revision) or revision
        for commit in self.commits:
            if commit.sha == sha:
                return commit
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def add(self, tree: dict[str, File], message: str, branch: str = "main") -> Commit:
        content = [
            self.kind,
            self.name,
            len(self.commits),
            message,
            [(path, tree[path].oid) for path in sorted(tree)],
        ]
        commit = Commit(hashlib.sha1(json.dumps(content).encode()).hexdigest(), message, tree)
        self.commits.append(commit)
        self.branches[branch] = commit.sha
        return commit


@dataclass
class Fault:
    endpoint: str
    kind: int | str  # a status, or one of FAULTS
    times: int
    path: str
    seconds: float


@dataclass
class Request:
    endpoint: str
    method: str
    path: str
    host: str
    token: bool
    status: int = 0


class HubServer:
    """See the top of this file."""

    def __init__(self) -> None:
        self.token = "hf_" + "testtoken" * 3
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}  # what was uploaded, by sha256
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.servers = [self.listen(HOST, 0)]
        self.port = self.servers[0].server_port
        self.servers.append(self.listen(OTHER_HOST, self.port))
        self.url = f"http://{HOST}:{self.port}"

    def listen(self, host: str, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer((host, port), functools.partial(Handler, self))
        server.daemon_threads = True
        return server

    def __enter__(self) -> HubServer:
        for server in self.servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a subprocess whose clients talk to this server and keep their files in `home`."""
        settings = re.compile("HF_|HUGGINGFACE_|TRANSFORMERS_|DATASETS_|.*_proxy$", re.IGNORECASE)
        return {name: value for name, value in os.environ.items() if not settings.match(name)} | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",  # its storage servers are not part of this one
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
        }

    def repo(self, kind: str, name: str) -> Repo:
        return self.repos[kind, name]

    def create(
        self, kind: str, name: str, files: dict[str, bytes] | None = None, private: bool = False
    ) -> Repo:
        repo = self.repos[kind, name] = Repo(kind, name, private)
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        repo.add({".gitattributes": File(attributes.encode(), lfs=False)}, "initial commit")
        if files:
            added = {path: File(data, path.endswith(LFS_SUFFIXES)) for path, data in files.items()}
            repo.add({**repo.at("main").tree, **added}, "Add files")
        return repo

    def fail(
        self, endpoint: str, fault: int | str, times: int = 1, path: str = "", seconds: float = 1
    ) -> None:
        assert endpoint in {known for known, _, _ in ROUTES}
        assert fault in FAULTS or isinstance(fault, int)
        self.faults.append(Fault(endpoint, fault, times, path, seconds))

    def heal(self) -> None:
        self.faults.clear()

    def seen(self, endpoint: str, path: str = "") -> list[Request]:
        return [request for request in self.requests if request.endpoint == endpoint and path in request.path]

    def next_fault(self, endpoint: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.endpoint == endpoint and fault.path in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection: finds the route of each request, plays its fault, and answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body leave in two writes

    def __init__(self, hub: HubServer, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)  # serves the connection

    def log_message(self, *arguments: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client left, or a fault threw it out
            super().handle()

    def answer(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.endpoint, self.values = route(self.command, url.path)
        self.host, token = self.headers["Host"].split(":")[0], self.headers["Authorization"]
        self.record = Request(self.endpoint, self.command, unquote(url.path), self.host, token is not None)
        self.hub.requests.append(self.record)
        self.fault = self.hub.next_fault(self.endpoint, self.record.path) if self.host == HOST else None
        length = int(self.headers["Content-Length"] or 0)
        if self.plays("reset") and self.command != "GET":
            self.rfile.read(length // 2)
            self.reset()
        self.body = self.rfile.read(length)
        self.status = 200
        self.fields: dict[str, str] = {}
        try:
            answer = self.serve(token)
        except HubError as error:
            answer = self.error(error)
        if self.plays("lost"):
            self.reset()
        self.reply(answer)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def plays(self, kind: str) -> bool:
        return self.fault is not None and self.fault.kind == kind

    def serve(self, token: str | None) -> Any:
        """The body of the answer; its status and header fields are left in `status` and `fields`."""
        if self.fault and isinstance(self.fault.kind, int):
            message, code = PLAYED.get(self.fault.kind, (f"Played fault {self.fault.kind}", ""))
            raise HubError(self.fault.kind, message, code)
        redirected = self.plays("redirect")
        if not redirected or self.endpoint in ("head", "download"):
            self.check(token)
            with self.hub.lock:
                body = getattr(self, f"serve_{self.endpoint}")()
        if redirected:  # the answer to a download tells of the file even then
            self.status = 307
            self.fields["Location"] = f"http://{OTHER_HOST}:{self.hub.port}{self.path}"
            return b""
        return body

    def check(self, token: str | None) -> None:
        """May this request be made at all?"""
        if token is not None and token != f"Bearer {self.hub.token}":
            raise HubError(401, "Invalid credentials in Authorization header")
        if token is None and self.endpoint in WRITES:
            raise HubError(401, "Invalid username or password.")
        if "name" not in self.values:
            return
        repo = self.hub.repos.get((self.values["kind"], self.values["name"]))
        # at the other host the address itself is the permission, as with signed addresses of storage
        if repo is None or (repo.private and token is None and self.host == HOST):
            raise HubError(401 if token is None else 404, "Repository not found", "RepoNotFound")
        if self.endpoint in WRITES:
            check_namespace(repo.name.split("/")[0])
        self.repo = repo

    def error(self, error: HubError) -> Any:
        self.status = error.status
        # One line of ASCII, whatever it quotes.
        self.fields = {"X-Error-Message": json.dumps(str(error))[1:-1]}
        if error.code:
            self.fields["X-Error-Code"] = error.code
        if error.status == 429 and self.fault:
            self.fields["Retry-After"] = str(int(self.fault.seconds))
        if error.code == "EntryNotFound":  # with it the client remembers that there is no such file
            self.fields["X-Repo-Commit"] = self.repo.at(self.values["revision"]).sha
        return error.body

    def reply(self, body: Any) -> None:
        if not isinstance(body, bytes):
            self.fields["Content-Type"] = "application/json"
            body = json.dumps(body).encode()
        pause = self.fault.seconds if self.fault and self.fault.kind == "drip" else 0.0
        sleep(pause)
        self.record.status = self.status
        self.send_response(self.status)
        while self.plays("endless"):
            self.send_header("X-More", "to come")
            self.flush_headers()
            sleep(0.1)
        for name, value in {"Content-Length": str(len(body)), **self.fields}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.plays("reset"):
            self.wfile.write(body[: len(body) // 2])
            self.reset()
        step = max(1, -(-len(body) // 4) if pause else len(body))
        for start in range(0, len(body), step):
            sleep(pause)
            self.wfile.write(body[start : start + step])

    def reset(self) -> None:
        """Break the connection so that the other side gets an error, not an end."""
        self.record.status = 0
        sleep(0.05)  # what was just sent would be lost with the connection
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        raise ConnectionResetError

    # ---- one method per endpoint: what it does, and the body of its answer

    def serve_unknown(self) -> Any:
        raise HubError(404, f"This server has no answer to {self.command} {self.path}")

    def serve_yaml(self) -> Any:
        error = card_error(json.loads(self.body)["content"])
        found = {"errors": [{"message": error}] if error else [], "warnings": []}
        if error:
            raise HubError(400, "Invalid metadata", body=found)
        return found

    def serve_create(self) -> Any:
        wanted = json.loads(self.body)
        namespace = wanted.get("organization") or USER
        check_namespace(namespace)
        kind, name = wanted.get("type") or "model", f"{namespace}/{wanted['name']}"
        url = f"{self.hub.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.hub.repos:
            raise HubError(409, f"You already created this {kind} repo", body={"url": url, "name": name})
        self.hub.create(kind, name, private=wanted.get("visibility") == "private")
        return {"url": url, "name": name, "id": "1"}

    def serve_info(self) -> Any:
        commit = self.repo.at(self.values.get("revision", "main"))
        return {
            "_id": "1",
            "id": self.repo.name,
            "author": self.repo.name.split("/")[0],
            "sha": commit.sha,
            "private": self.repo.private,
            "gated": False,
            "disabled": False,
            "createdAt": NOW,
            "lastModified": NOW,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": path} for path in sorted(commit.tree)],
        }

    def serve_tree(self) -> Any:
        tree, folder = self.repo.at(self.values["revision"]).tree, self.values.get("path", "").strip("/")
        found = entries(
            tree, folder + "/" if folder else "", self.query.get("recursive") in (["true"], ["True"])
        )
        if folder and not found:
            raise HubError(404, f"{folder} does not exist on {self.values['revision']!r}", "EntryNotFound")
        return found

    def serve_paths(self) -> Any:
        tree, found = self.repo.at(self.values["revision"]).tree, []
        for path in parse_qs(self.body.decode()).get("paths", []):
            if path in tree:
                found.append(tree[path].entry(path))
            elif any(other.startswith(f"{path.strip('/')}/") for other in tree):
                found.append(folder_entry(path.strip("/")))
        return found

    def serve_branch(self) -> Any:
        start = json.loads(self.body).get("startingPoint", "main")
        self.repo.branches[self.values["branch"]] = self.repo.at(start).sha
        return {}

    def serve_preupload(self) -> Any:
        tree, answers = self.repo.at(self.values["revision"]).tree, []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            mode = (
                "lfs"
                if path.endswith(LFS_SUFFIXES) or b"\0" in base64.b64decode(file["sample"])
                else "regular"
            )
            oid = tree[path].etag if path in tree else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def serve_batch(self) -> Any:
        objects, verify = (
            json.loads(self.body)["objects"],
            self.hub.url + self.path.removesuffix("batch") + "verify",
        )
        for wanted in objects:
            if wanted["oid"] not in self.hub.objects:
                upload = f"{self.hub.url}/lfs/{wanted['oid']}"
                wanted["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        return {"transfer": "basic", "objects": objects}

    def serve_upload(self) -> Any:
        data = damaged(self.body) if self.plays("corrupt") else self.body
        if hashlib.sha256(data).hexdigest() != self.values["sha256"]:
            raise HubError(400, "The sha256 of the content is not the one it was announced with")
        self.hub.objects[self.values["sha256"]] = data
        return b""

    def serve_verify(self) -> Any:
        wanted = json.loads(self.body)
        if len(self.hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise HubError(404, f"No object {wanted['oid']} of {wanted['size']} bytes")
        return {}

    def serve_commit(self) -> Any:
        branch = self.values["revision"]
        if branch not in self.repo.branches:
            raise HubError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        parent = self.repo.at(branch)
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        if header["value"].get("parentCommit", parent.sha) != parent.sha:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(parent.tree)
        for operation in operations:
            self.change(tree, operation["key"], operation["value"])
        commit = self.repo.add(tree, header["value"]["summary"], branch)
        kind = "datasets/" if self.repo.kind == "dataset" else ""
        url = f"{self.hub.url}/{kind}{self.repo.name}/commit/{commit.sha}"
        return {"success": True, "commitOid": commit.sha, "commitUrl": url, "hookOutput": ""}

    def change(self, tree: dict[str, File], key: str, value: dict[str, Any]) -> None:
        """Apply one operation of a commit."""
        path = value["path"]
        if not path or path.startswith("/") or {"", ".", "..", ".git"} & set(path.rstrip("/").split("/")):
            raise HubError(400, f"Bad path {path!r}")
        if key == "file":
            tree[path] = File(base64.b64decode(value["content"]), lfs=False)
        elif key == "lfsFile" and value["oid"] in self.hub.objects:
            tree[path] = File(self.hub.objects[value["oid"]], lfs=True)
        elif key == "lfsFile":
            raise HubError(400, f"{path} points to an object that was never uploaded")
        elif key == "deletedFile" and path in tree:
            del tree[path]
        else:
            raise HubError(400, f"Unknown operation {key!r}")

    def serve_download(self) -> Any:
        commit = self.repo.at(self.values["revision"])
        file = commit.tree.get(self.values["path"])
        if file is None:
            raise HubError(404, "Entry not found", "EntryNotFound")
        self.fields = {"X-Repo-Commit": commit.sha, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.lfs:
            self.fields |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
        return self.cut(damaged(file.data) if self.plays("corrupt") else file.data)

    serve_head = serve_download

    def cut(self, data: bytes) -> bytes:
        """All of the data, or the range that was asked for."""
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"] or "")
        if not wanted:
            return data
        size = len(data)
        first = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
        last = min(int(wanted[2]), size - 1) if wanted[1] and wanted[2] else size - 1
        self.status = 206 if first <= last else 416
        self.fields["Content-Range"] = f"bytes {first}-{last}/{size}" if first <= last else f"bytes */{size}"
        return data[first : last + 1]


def route(method: str, path: str) -> tuple[str, dict[str, str]]:
    for endpoint, wanted, pattern in ROUTES:
        if method == wanted and (match := re.fullmatch(pattern, path)):
            values = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
            return endpoint, values | {"kind": KINDS[values.get("kind", "models")]}
    return "unknown", {}


def check_namespace(namespace: str) -> None:
    if namespace not in NAMESPACES:
        raise HubError(403, f"You don't have the rights to write to the namespace {namespace!r}")


def folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}


def entries(tree: dict[str, File], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What lies in a folder ("" or "a/b/"), folders first."""
    inside = {path[len(folder) :]: file for path, file in sorted(tree.items()) if path.startswith(folder)}
    names = {"/".join(path.split("/")[:depth]) for path in inside for depth in range(1, path.count("/") + 1)}
    folders = [folder_entry(folder + name) for name in sorted(names) if recursive or "/" not in name]
    return folders + [f.entry(folder + path) for path, f in inside.items() if recursive or "/" not in path]


def damaged(data: bytes) -> bytes:
    """One bit of the last byte changed: the size stays, the hash does not."""
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def card_error(text: str) -> str | None:
    """What is wrong with the YAML at the top of a README."""
    match = re.match(r"---\r?\n(.*?)\r?\n?---\s*(\n|$)", text, re.DOTALL)
    try:
        header = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError as error:
        return f"YAML Metadata Error: {error}"
    return None if isinstance(header, dict) else "YAML Metadata Error: the header is not a mapping"


def in_a_process(environment: dict[str, str], program: str, folder: Path) -> Any:
    """What a fresh Python leaves in `result`, as JSON knows it."""
    program = f"{textwrap.dedent(program)}\nimport json; json.dump(result, open('result.json', 'w'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text())
