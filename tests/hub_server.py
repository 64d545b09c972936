"""A stand-in for the Hugging Face Hub on loopback, speaking as much of its API as huggingface_hub uses for a download.

Large files are redirected to a second host (here another name of loopback), as the Hub does with its CDN, so that a
test can see whether the token goes there. Everything that is asked for is written down in `requests`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin")
"""Endings of the files that the Hub keeps in LFS: their ETag is their SHA-256."""


@dataclass
class Repo:
    """A repository: its files at each commit, and what its branches and tags point to."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str | None = None
    """The only token that may see it; None: public."""
    gated: bool = False
    """Everybody sees that it exists; its files only with `token`."""


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None
    sent: int = 0


@dataclass
class Hub:
    """The state of the stand-in; a test changes it while it runs."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cut_after: int | None = None
    """How many bytes of a large file are sent before the connection is cut; None: all."""
    cuts: int = 1_000_000
    """How many more times the connection is cut."""
    ranges: bool = True
    status: int | None = None
    """An HTTP status for every answer."""
    url: str = ""
    cdn: str = ""

    def add(self, name: str, files: dict[str, bytes], **about: Any) -> str:
        """A new commit on the repository's main branch; returns its hash."""
        repo = self.repos.setdefault(name, Repo({}, {}))
        commit = hashlib.sha1(name.encode() + bytes([len(repo.commits)])).hexdigest()
        repo.commits[commit] = files
        repo.refs["main"] = commit
        for key, value in about.items():
            setattr(repo, key, value)
        return commit

    def paths(self, method: str = "GET") -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    @property
    def sent(self) -> int:
        """Bytes of file contents that went out."""
        return sum(request.sent for request in self.requests)


@contextmanager
def serve() -> Iterator[Hub]:
    """A running stand-in; `hub.url` is what HF_ENDPOINT is to be set to."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.state, unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization", "")
        self.request_seen = Request(
            self.command, self.path, self.headers.get("Range"), authorization.removeprefix("Bearer ") or None
        )
        hub.requests.append(self.request_seen)
        if hub.status:
            return self._send(hub.status, {}, b"out of order")
        if path.startswith("/cdn/"):
            digest = path.removeprefix("/cdn/")
            files = (f for repo in hub.repos.values() for commit in repo.commits.values() for f in commit.values())
            content = next(file for file in files if hashlib.sha256(file).hexdigest() == digest)
            return self._send_file(content, {"ETag": f'"{digest}"'}, body)
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            return self._describe(name, revision or "main")
        name = path.removeprefix("/").partition("/resolve/")[0]
        # A revision's slashes arrive escaped, the file's do not: the raw path tells them apart.
        raw = urlsplit(self.path).path.partition("/resolve/")[2]
        revision, filename = unquote(raw.partition("/")[0]), unquote(raw.partition("/")[2])
        return self._resolve(name, revision, filename, body)

    def _find(self, name: str, revision: str, files: bool) -> dict[str, bytes] | None:
        """The files at a revision; None once a refusal has been sent."""
        repo, token = self.state.repos.get(name), self.request_seen.token
        if token == "invalid":
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.token and not repo.gated and token != repo.token):
            # The Hub does not say whether a repository that one may not see exists.
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if repo.gated and files and token != repo.token:
            return self._refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        self.commit = commit
        return repo.commits[commit]

    def _describe(self, name: str, revision: str) -> None:
        files = self._find(name, revision, files=False)
        if files is not None:
            siblings = [{"rfilename": file} for file in files]
            answer = {
                "id": name,
                "modelId": name,
                "sha": self.commit,
                "siblings": siblings,
                "tags": [],
                "private": False,
            }
            self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _resolve(self, name: str, revision: str, filename: str, body: bool) -> None:
        files = self._find(name, revision, files=True)
        if files is None:
            return
        headers = {"X-Repo-Commit": self.commit}
        if filename not in files:
            return self._send(404, {**headers, "X-Error-Code": "EntryNotFound"}, b"")
        content = files[filename]
        if filename.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            headers |= {"Location": f"{self.state.cdn}/cdn/{digest}", "ETag": '"pointer"'}
            return self._send(302, headers, b"")
        self._send_file(content, {**headers, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, body)

    def _send_file(self, content: bytes, headers: dict[str, str], body: bool) -> None:
        hub, asked = self.state, self.headers.get("Range")
        if asked and hub.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else len(content), len(content))
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
            status, content = 206, content[start:end]
        else:
            status = 200
        if not body:
            return self._send(status, headers, content, send=False)
        if hub.cut_after is not None and hub.cuts > 0 and len(content) > hub.cut_after:
            hub.cuts -= 1
            self._send(status, headers, content, upto=hub.cut_after)
            self.close_connection = True
            return None
        self._send(status, headers, content)

    def _send(
        self, status: int, headers: dict[str, str], body: bytes, send: bool = True, upto: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send and self.command != "HEAD":
            try:
                for start in range(0, len(body[:upto]), 1 << 16):
                    chunk = body[:upto][start : start + (1 << 16)]
                    self.wfile.write(chunk)
                    self.request_seen.sent += len(chunk)
            except (BrokenPipeError, ConnectionResetError):  # whoever asked has seen enough
                self.close_connection = True

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, headers, json.dumps({"error": message}).encode())
