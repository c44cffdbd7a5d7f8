"""A hub on this machine, as much of it as reading a checkpoint needs: metadata, tree, files by range."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves one folder as repository `someone/model`; counts the bytes it sent.

    gated: refuses everything. gated_files: lists the files and refuses their contents. ranges: honours byte ranges.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.sent = folder, 0
        self.gated, self.gated_files, self.ranges = False, False, True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if not path.startswith(("/api/models/someone/model", "/someone/model/")):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if self.server.gated or (self.server.gated_files and not path.startswith("/api/")):
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/"):
            revision = path.partition("/revision/")[2] or path.partition("/tree/")[2] or "main"
            if revision not in ("main", COMMIT):
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self.answer(200, json.dumps(self.tree() if "/tree/" in path else self.info()).encode())
        file = self.server.folder / path.rsplit("/", 1)[1]
        if not file.is_file():
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        self.file(file.read_bytes())

    def info(self) -> dict[str, Any]:
        names = sorted(p.name for p in self.server.folder.iterdir())
        return {"id": "someone/model", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}

    def tree(self) -> list[dict[str, Any]]:
        files = [(p.name, p.read_bytes()) for p in sorted(self.server.folder.iterdir())]
        return [{"type": "file", "path": name, "size": len(data), "oid": self.etag(data)} for name, data in files]

    def etag(self, data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def file(self, data: bytes) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.etag(data)}"', "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted and self.server.ranges:
            low, high = wanted.removeprefix("bytes=").split("-")
            stop = min(int(high) + 1, len(data)) if high else len(data)
            headers["Content-Range"] = f"bytes {low}-{stop - 1}/{len(data)}"
            return self.answer(206, data[int(low) : stop], headers)
        self.answer(200, data, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.server.sent += len(body)
            self.wfile.write(body)


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
