"""The way to the Hub and back: bounded in time, to one host, checked by hashes, one sentence per failure."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    close_session,
    constants,
    get_session,
    get_token,
    set_client_factory,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import parse_ratelimit_headers
from huggingface_hub.utils.sha import git_hash

from hf_fixastep._compat.hub_private import client_factory
from hf_fixastep.hub.checks import check_repo_id, shown


PATIENCE = 60.0  # seconds without success until retries end
STALL = 30.0  # seconds that a single send or receive may take
SLOWEST = 1024  # bytes per second that an answer longer than `PATIENCE` has to bring
PAUSE = 1.0  # seconds between tries
TRIES = 3  # of a whole push, which finds what an earlier one has left
TRANSIENT = (408, 409, 412, 429, 500, 502, 503, 504)
# What a model needs; no pickles and no code.
PULLED = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
)

# Of the client, the network, hf-xet (RuntimeError), and a card whose header the Hub refuses (ValueError).
FAILURES = (HfHubHTTPError, httpx2.HTTPError, OSError, RuntimeError, ValueError)

T = TypeVar("T")

REASONS = {
    400: "the Hub refused what it got",
    401: "the Hub does not accept the token: log in with `hf auth login`, or set HF_TOKEN to a valid one",
    403: "the token may not do this: use one with write access to that name, or choose a name of your own",
    404: "there is no such repository or revision, or the token may not see it: check the name",
    409: "it is being changed by someone else: try again in a minute",
    412: "it was changed by someone else meanwhile: try again",
    429: "the Hub gets too many requests from you: try again later",
}


# ---- limits


class Trouble(threading.local):
    """Since when no request of this thread has succeeded; ends the retries of a client without deadline."""

    since: float | None = None
    tries = 0
    last = "the connection broke or no answer came"

    def before(self, request: httpx2.Request) -> None:
        now = time.monotonic()
        self.since, self.tries = self.since or now, self.tries + 1
        if self.tries > 2 and now - self.since > PATIENCE:
            raise TimeoutError(f"{self.last} for {now - self.since:.0f} seconds: try again later")
        self.last = "the connection broke or no answer came"

    def after(self, response: httpx2.Response) -> None:
        if response.status_code not in TRANSIENT:
            self.since, self.tries = None, 0
            return
        self.last = f"the Hub answered with {response.status_code}"
        limit = parse_ratelimit_headers(response.headers)
        asked = response.headers.get("Retry-After", "")
        wait = max(limit.reset_in_seconds if limit else 0, int(asked) if asked.isdecimal() else 0)
        if wait > PATIENCE:
            raise TimeoutError(f"the Hub asks to wait for {wait} seconds: try again after that")


class SteadyStream(httpx2.SyncByteStream):
    """The body of an answer, given up if it only drips: every byte would start the time of `STALL` anew."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[bytes]:
        start, received = time.monotonic(), 0
        for part in self.stream:
            received += len(part)
            passed = time.monotonic() - start
            if passed > PATIENCE and received < passed * SLOWEST:
                raise TimeoutError(
                    f"the Hub has sent {received:,} bytes in {passed:.0f} seconds: try again later"
                )
            yield part

    def close(self) -> None:
        self.stream.close()


def expect_steadiness(response: httpx2.Response) -> None:
    response.stream = SteadyStream(response.stream)


def expect_headers(request: httpx2.Request) -> None:
    """Give up an answer whose headers drip: a read cannot be ended but by closing what it reads from."""
    start, timer = 0.0, threading.Timer(PATIENCE, close_session)

    def trace(event: str, info: Mapping[str, Any]) -> None:
        nonlocal start, timer
        if event.endswith("receive_response_headers.started"):  # twice where a proxy answers first
            start, timer = time.monotonic(), threading.Timer(PATIENCE, close_session)
            timer.daemon = True
            timer.start()
        elif event.endswith(("receive_response_headers.complete", "receive_response_headers.failed")):
            timer.cancel()
            passed = time.monotonic() - start
            if event.endswith("failed") and passed >= PATIENCE:
                raise TimeoutError(
                    f"the Hub has not sent its headers in {passed:.0f} seconds: try again later"
                )

    request.extensions["trace"] = trace


def refuse_other_hosts(response: httpx2.Response) -> None:
    """What is pushed goes to the host that the user named, and to no other."""
    if response.has_redirect_location:
        target = response.url.join(response.headers["Location"])
        if (target.scheme, target.netloc) != (response.url.scheme, response.url.netloc):
            raise ConnectionError(
                f"the Hub sends us to another host, {shown(target.host)}, to which nothing was sent: check "
                "HF_ENDPOINT"
            )


@contextlib.contextmanager
def limits(other_hosts: bool) -> Iterator[None]:
    """Calls to the Hub inside end in bounded time.

    Args:
        other_hosts: follow redirects to them, as downloads from the Hub's storage need.
    """
    earlier, trouble = client_factory(), Trouble()

    def limited() -> httpx2.Client:
        client = earlier()
        client.timeout = STALL  # the default is none at all
        hooks = client.event_hooks
        after = [trouble.after, expect_steadiness, *([] if other_hosts else [refuse_other_hosts])]
        client.event_hooks = {
            "request": [*hooks["request"], trouble.before, expect_headers],
            "response": [*hooks["response"], *after],
        }
        return client

    set_client_factory(limited)
    try:
        yield
    finally:
        set_client_factory(earlier)


def check_online() -> None:
    """Fail within five seconds where the Hub cannot be reached; its clients would try for minutes."""
    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set, so the Hub is not asked")
    errors: list[Exception | None] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=3.0, follow_redirects=False)
            errors.append(None)
        except Exception as error:
            errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(4.0)  # the look-up of a name knows no time limit of its own
    if not errors or errors[0] is not None:
        raise ConnectionError(
            f"the Hub at {constants.ENDPOINT} cannot be reached: check the network or HF_ENDPOINT"
        )


def online() -> bool:
    try:
        check_online()
    except ConnectionError:
        return False
    return True


def reason(error: Exception) -> str:
    """What went wrong and what to do, as the end of a sentence."""
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)) and isinstance(error.__cause__, Exception):
        return reason(error.__cause__)  # that it is not in the cache, or could not be uploaded, is no reason
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        known = REASONS.get(status, f"the Hub answered with {status}: try again later")
        said = f" ({shown(error.server_message)})" if status == 400 and error.server_message else ""
        return f"{known}{said}"
    if isinstance(error, httpx2.TimeoutException):
        return f"the Hub was silent for {STALL:.0f} seconds: try again later"
    if isinstance(error, httpx2.HTTPError):
        return "the connection broke: try again"
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:400]).rstrip(".")


# ---- push and pull


def create_repo(
    repo_id: str, *, kind: str = "model", private: bool | None = None, token: str | None = None
) -> str:
    """The full name of a repository that can be pushed to; made if it is not there."""

    def create() -> str:
        return HfApi(token=token).create_repo(repo_id, repo_type=kind, private=private, exist_ok=True).repo_id

    try:
        return _retried(create, token)
    except FAILURES as error:
        raise OSError(f"{repo_id} cannot be pushed to: {reason(error)}.") from error


def push_files(
    files: Mapping[str, bytes | Path],
    repo_id: str,
    *,
    message: str,
    kind: str = "model",
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    stale: Sequence[str] = (),
) -> CommitInfo:
    """One commit with these files, compared with what the Hub then has.

    Args:
        files: contents or local files, by path in the repository.
        kind: model or dataset.
        stale: paths to be deleted if they are there and not among `files`.
    """

    def push() -> CommitInfo:
        api = HfApi(token=token)
        name = api.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(name, branch=revision, repo_type=kind, exist_ok=True)
        where: dict[str, Any] = {"repo_id": name, "repo_type": kind}
        there = api.list_repo_files(**where, revision=revision)
        added = [
            CommitOperationAdd(path, os.fspath(f) if isinstance(f, Path) else f) for path, f in files.items()
        ]
        gone = [CommitOperationDelete(path) for path in stale if path in there and path not in files]
        commit = api.create_commit(
            operations=[*added, *gone], commit_message=message, revision=revision, **where
        )
        found = api.get_paths_info(paths=list(files), revision=commit.oid, **where)
        _compare(added, {file.path: file for file in found})
        return commit

    try:
        return _retried(push, token)
    except FAILURES as error:
        raise OSError(
            f"{repo_id} was not pushed: {reason(error)}. Nothing on this machine was changed."
        ) from error


def pull(repo_id: str, revision: str | None = None) -> Path:
    """A folder with config, image processor and weights of a model; from the cache where the Hub is away."""
    check_repo_id(repo_id, "model")
    wanted: dict[str, Any] = {"repo_id": repo_id, "revision": revision, "allow_patterns": list(PULLED)}
    try:
        check_online()
    except ConnectionError as error:
        try:
            return Path(snapshot_download(**wanted, local_files_only=True))
        except LocalEntryNotFoundError:
            advice = "give the folder of a model, or run once where the Hub can be reached"
            raise OSError(f"{repo_id} is not in the cache, and {reason(error)}; {advice}.") from error
    try:
        with limits(other_hosts=True):
            folder = Path(snapshot_download(**wanted))
            _check_hashes(folder, repo_id)
            return folder
    except FAILURES as error:
        raise OSError(f"{repo_id} could not be pulled: {reason(error)}.") from error


def _retried(push: Callable[[], T], token: str | None) -> T:
    """Repeat what the client asks only once, such as a commit, where the fault may pass."""
    if token is None and get_token() is None:
        raise PermissionError("no token was found: log in with `hf auth login`, or set HF_TOKEN")
    check_online()
    for left in reversed(range(TRIES)):
        try:
            with limits(other_hosts=False):
                return push()
        except (HfHubHTTPError, httpx2.HTTPError) as error:
            lasting = isinstance(error, HfHubHTTPError) and error.response.status_code not in TRANSIENT
            if lasting or not left:
                raise
            time.sleep(PAUSE)
    raise AssertionError("unreachable")


def _compare(added: Sequence[CommitOperationAdd], found: Mapping[str, Any]) -> None:
    """The Hub knows large files by their SHA-256 and small ones by the hash of git."""
    for operation in added:
        path, file = operation.path_in_repo, found.get(operation.path_in_repo)
        if file is not None and file.lfs:
            equal = file.lfs.sha256 == operation.upload_info.sha256.hex()
        else:
            with operation.as_file() as content:
                equal = file is not None and file.blob_id == git_hash(content.read())
        if not equal:
            raise OSError(f"the Hub has another content of {path} than was sent: push again")


def _check_hashes(folder: Path, repo_id: str) -> None:
    """A download compares only sizes. What came damaged leaves the cache, so that it is pulled again."""
    found = HfApi().verify_repo_checksums(repo_id, revision=folder.name, local_dir=folder)
    for wrong in found.mismatches:
        path = folder / wrong["path"]
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    if found.mismatches:
        names = " and ".join(wrong["path"] for wrong in found.mismatches)
        raise OSError(f"{names} came damaged and was removed; pull it again")
