"""A hub on this machine, as much of it as reading, publishing and fetching need, and ways to make it fail.

The real client talks to it: repositories with commits and tags, LFS objects on a host of their own behind a redirect,
files by byte range.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from convert.hub.tree import git_blob

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 200_000
ROOT = Path(__file__).parent.parent


@dataclass
class Fault:
    """What happens to the first `times` requests, after `skip` others, whose `METHOD path` the pattern is found in.

    status: this answer with these headers. cut: half the body, then nothing. drop: half the request's body is read,
    then nothing. flip: one bit of the body is another, of a PUT the one that arrives.
    then: called first; it may kill someone.
    """

    pattern: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    drop: bool = False
    flip: bool = False
    then: Callable[[], object] | None = None


@dataclass
class Repo:
    """commits: sha -> path -> bytes. The last one is main."""

    commits: dict[str, dict[str, bytes]]
    private: bool = False
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]

    def at(self, revision: str) -> str | None:
        """The commit of a branch, tag or commit."""
        found = self.head if revision == "main" else self.tags.get(revision, revision)
        return found if found in self.commits else None


class FolderRepo(Repo):
    """A flat folder as it is now, under one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.private, self.tags = folder, False, {}

    @property
    def commits(self) -> dict[str, dict[str, bytes]]:  # type: ignore[override]
        return {COMMIT: {p.name: p.read_bytes() for p in sorted(self.folder.iterdir()) if p.is_file()}}


class Hub(ThreadingHTTPServer):
    """Serves one folder as repository `someone/model`, and what is published to it; counts the bytes it sent.

    gated: refuses everything. gated_files: lists the files and refuses their contents. ranges: honours byte ranges.
    log: (seconds, METHOD path) of every request. lfs: oid -> bytes. leaked: whether a token reached the LFS host.
    damaged: paths whose listed digest is not that of what was sent.
    """

    daemon_threads = True

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sent = 0
        self.gated, self.gated_files, self.ranges = False, False, True
        self.repos: dict[str, Repo] = {} if folder is None else {"someone/model": FolderRepo(folder)}
        self.lfs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.log: list[tuple[float, str]] = []
        self.leaked = False
        self.damaged: set[str] = set()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            self.log.append((time.monotonic(), request))
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def asked(self, pattern: str) -> list[float]:
        """When requests came that the pattern is found in."""
        return [at for at, request in self.log if re.search(pattern, request)]


def is_lfs(path: str, data: bytes) -> bool:
    return bool(data) and (path.endswith((".safetensors", ".cubin")) or len(data) > LARGE)


class Handler(BaseHTTPRequestHandler):
    server: Hub
    broken: Fault | None = None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.begin()

    def do_GET(self) -> None:
        self.begin()

    def do_POST(self) -> None:
        self.begin()

    def do_PUT(self) -> None:
        self.begin()

    def begin(self) -> None:
        path, size = unquote(self.path.split("?")[0]), int(self.headers.get("Content-Length") or 0)
        self.broken = self.server.fault(f"{self.command} {path}")
        if self.broken is not None and self.broken.drop:
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        self.body = self.rfile.read(size)
        if self.broken is not None and self.broken.then is not None:
            self.broken.then()
        if self.broken is not None and self.broken.status is not None:
            return self.answer(self.broken.status, b"{}", self.broken.headers)
        if self.server.gated or (self.server.gated_files and not path.startswith("/api/")):
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/lfs/"):
            return self.object(path.removeprefix("/lfs/"))
        if path == "/api/repos/create":
            return self.create(json.loads(self.body))
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(self.body))
        return self.repository(path)

    def repository(self, path: str) -> None:
        owner, name, what, rest = [*path.removeprefix("/api/models").split("/", 4)[1:], "", ""][:4]
        repo = self.server.repos.get(f"{owner}/{name}")
        if repo is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if what == "refs":
            return self.json(refs(repo))
        revision, _, file = rest.partition("/") if what in ("tree", "resolve") else (rest, "", "")
        commit = repo.at(revision or "main")
        if commit is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if what in ("", "revision"):
            siblings = [{"rfilename": n} for n in repo.commits[commit]]
            return self.json({"id": f"{owner}/{name}", "sha": commit, "private": repo.private, "siblings": siblings})
        if what == "tree":
            return self.json([entry(n, d, n in self.server.damaged) for n, d in repo.commits[commit].items()])
        if what == "resolve":
            return self.resolve(repo.commits[commit].get(file), file, commit)
        if what == "preupload":
            return self.json({"files": [mode(f, repo.files) for f in json.loads(self.body)["files"]]})
        if what == "commit":
            return self.commit(repo, f"{owner}/{name}")
        if what == "tag":
            repo.tags[json.loads(self.body)["tag"]] = commit
            return self.json({})
        return self.answer(404, b"{}")

    def create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.server.url}/{name}"}
        if name in self.server.repos:
            return self.json(url, 409)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        first = {"0" * 40: {".gitattributes": b"*.safetensors filter=lfs\n"}}
        self.server.repos[name] = Repo(first, private)
        self.json(url)

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for o in wanted["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.server.url}/lfs/{o['oid']}"}}}
            objects.append({**o, **({} if o["oid"] in self.server.lfs else upload)})
        self.json({"transfer": "basic", "objects": objects})

    def object(self, oid: str) -> None:
        """An LFS object, on the host that the redirect names."""
        if self.command == "PUT":
            if self.broken is not None and self.broken.flip:
                self.body = self.body[:-1] + bytes([self.body[-1] ^ 1])
            if hashlib.sha256(self.body).hexdigest() != oid:
                return self.answer(400, b"")
            self.server.lfs[oid] = self.body
            return self.answer(200, b"")
        self.server.leaked |= "Authorization" in self.headers
        self.file(self.server.lfs[oid], {"ETag": f'"{oid}"'})

    def commit(self, repo: Repo, name: str) -> None:
        files = dict(repo.files)
        for line in self.body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if row["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
        sha = hashlib.sha1(self.body + repo.head.encode()).hexdigest()
        repo.commits[sha] = files
        self.json({"commitOid": sha, "commitUrl": f"{self.server.url}/{name}/commit/{sha}"})

    def resolve(self, data: bytes | None, path: str, commit: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if data is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", **headers})
        if not is_lfs(path, data):
            return self.file(data, {"ETag": f'"{git_blob(data)}"', **headers})
        oid = hashlib.sha256(data).hexdigest()
        self.server.lfs[oid] = data
        other_host = self.server.url.replace("127.0.0.1", "localhost")
        headers |= {"Location": f"{other_host}/lfs/{oid}", "X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
        self.answer(302, b"", headers)

    def file(self, data: bytes, headers: dict[str, str]) -> None:
        headers = {"Accept-Ranges": "bytes", **headers}
        wanted = self.headers.get("Range")
        if wanted and self.server.ranges:
            low, high = wanted.removeprefix("bytes=").split("-")
            stop = min(int(high) + 1, len(data)) if high else len(data)
            headers["Content-Range"] = f"bytes {low}-{stop - 1}/{len(data)}"
            return self.answer(206, data[int(low) : stop], headers)
        self.answer(200, data, headers)

    def json(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode())

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.broken is not None and self.broken.flip and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if self.broken is not None and self.broken.cut:
            body = body[: len(body) // 2]
        self.server.sent += len(body)
        self.wfile.write(body)


def entry(path: str, data: bytes, damaged: bool) -> dict[str, Any]:
    """One file of a tree listing."""
    digest = hashlib.sha256(data + b"!" * damaged).hexdigest()
    out: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_blob(data + b"!" * damaged)}
    if is_lfs(path, data):
        out["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return out


def mode(file: dict[str, Any], present: dict[str, bytes]) -> dict[str, Any]:
    """How the client shall upload one file."""
    large = file["size"] > LARGE or file["path"].endswith((".safetensors", ".cubin"))
    out = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
    if (data := present.get(file["path"])) is not None:
        out["oid"] = hashlib.sha256(data).hexdigest() if large else git_blob(data)
    return out


def refs(repo: Repo) -> dict[str, Any]:
    main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.head}
    tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in repo.tags.items()]
    return {"branches": [main], "tags": tags, "converts": []}


@contextmanager
def hub(folder: Path | None = None) -> Iterator[Hub]:
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def environment(server: Hub, home: Path) -> dict[str, str]:
    """For a process of its own: the client reads its address when it is imported."""
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    return env | {"HF_TOKEN": "hf_of_nobody"}


def kiln(server: Hub, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "convert", *args]
    return subprocess.run(command, env=environment(server, home), cwd=home, capture_output=True, text=True)


def point_at(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of this very process speaks to `server`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    close_session()
