"""The lab over HTTP: one page, and JSON for its questions. Comes with the extra `lab` (starlette, uvicorn).

Made for one person at one machine, and careful all the same: no path from a client is ever opened, a foreign web site
can neither read nor start anything (its Host, Origin or content type gives it away), every answer is bounded, and one
forward pass runs at a time while the others wait in line.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llmcli.errors import LlmcliError, UsageError
from llmcli.generate import Sampling
from llmcli.lab import Lab, UnknownText
from llmcli.page import as_html

T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(ge=1)]

PORT = 8765
MOST_BODY = 256 << 10  # bytes
MOST_WAITING = 64
"""Requests that may wait for their forward pass; further ones are told to come back."""
GRACE = 2
"""Seconds that answers under way have when the server closes."""

HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """What begins a text."""

    prompt: str


class Draw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is drawn, as a body or as a query says it."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def sampling(self) -> Sampling:
        """Raises msgspec.ValidationError for what is out of range."""
        return msgspec.convert(msgspec.structs.asdict(self), Sampling)


class Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Sliced(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    at: str
    pooled: bool = False


class Sketched(msgspec.Struct, forbid_unknown_fields=True):
    names: str


class Top(Draw, frozen=True, kw_only=True):
    position: int
    count: Positive = 10


class Scored(msgspec.Struct, forbid_unknown_fields=True):
    position: int
    token: int


class Looked(msgspec.Struct, forbid_unknown_fields=True):
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    stop: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30


class Near(msgspec.Struct, forbid_unknown_fields=True):
    token: int
    count: Positive = 10


class _Queue:
    """One forward pass at a time, in the order asked for; who hangs up while waiting is left out."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "forward")  # one thread: never two passes at once, whatever is cancelled
        self._waiting = 0

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        if self._waiting >= MOST_WAITING:
            raise HTTPException(503, f"{self._waiting} requests are waiting already")
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    raise ClientDisconnect
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def application(lab: Lab, host: str = "127.0.0.1") -> ASGIApp:
    """The page and its questions as an ASGI application, for a server that listens on `host`."""
    html = as_html()[0]
    content_policy = policy(html)
    queue = _Queue()

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        yield
        queue.close()

    async def show(request: Request) -> Response:
        headers = {"content-security-policy": content_policy}
        return Response(html, media_type="text/html", headers=headers)

    async def model(request: Request) -> Response:
        return _json(lab.info())

    async def begin(request: Request) -> Response:
        asked = await _body(request, Prompt)
        return _json(await queue.run(request, lambda: lab.start(asked.prompt)), 201)

    async def step(request: Request) -> Response:
        sampling, text = (await _body(request, Draw)).sampling(), request.path_params["text"]
        return _json(await queue.run(request, lambda: lab.step(text, sampling)), 201)

    async def text(request: Request) -> Response:
        return _json(lab.text_info(request.path_params["text"]))

    async def nearest(request: Request) -> Response:
        asked = _query(request, Near)
        return _json(await run_in_threadpool(lab.nearest, asked.token, asked.count))

    def of_pass(answer: Callable[[Request, str, int], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            return _json(await answer(request, request.path_params["text"], request.path_params["number"]))

        return handler

    async def stage(request: Request, text: str, number: int) -> Any:
        name = _query(request, Named).name
        return await run_in_threadpool(lambda: lab.stage(lab.recorded(text, number), name))

    async def values(request: Request, text: str, number: int) -> Any:
        asked = _query(request, Sliced)
        at = slices(asked.at)
        return await run_in_threadpool(lambda: lab.values(text, number, asked.name, at, asked.pooled))

    async def sketches(request: Request, text: str, number: int) -> Any:
        names = _query(request, Sketched).names.split(",")
        return await run_in_threadpool(lambda: lab.sketches(lab.recorded(text, number), names))

    async def top(request: Request, text: str, number: int) -> Any:
        asked = _query(request, Top)
        sampling = Draw(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p).sampling()
        return await run_in_threadpool(
            lambda: lab.top(lab.recorded(text, number), asked.position, asked.count, sampling)
        )

    async def product(request: Request, text: str, number: int) -> Any:
        asked = _query(request, Scored)
        return await run_in_threadpool(lambda: lab.product(lab.recorded(text, number), asked.position, asked.token))

    async def lens(request: Request, text: str, number: int) -> Any:
        asked = _query(request, Looked)  # the model's own norm and output: its turn must come
        return await queue.run(request, lambda: lab.lens(lab.recorded(text, number), asked.start, asked.stop))

    passes = "/api/texts/{text:str}/passes/{number:int}"
    questions = {"stage": stage, "values": values, "sketches": sketches, "top": top, "product": product, "lens": lens}
    app = Starlette(
        routes=[
            Route("/", show),
            Route("/api/model", model),
            Route("/api/texts", begin, methods=["POST"]),
            Route("/api/texts/{text:str}", text),
            Route("/api/texts/{text:str}/next", step, methods=["POST"]),
            Route("/api/nearest", nearest),
            *(Route(f"{passes}/{name}", of_pass(answer)) for name, answer in questions.items()),
        ],
        exception_handlers={
            LlmcliError: _refused,
            msgspec.ValidationError: _refused,
            msgspec.DecodeError: _refused,
            HTTPException: _failed,
            ClientDisconnect: _gone,
            Exception: _fault,
        },
        lifespan=running,
    )
    return _Guard(app, host)


class _Guard:
    """Refuses requests that a foreign page could have sent, and puts the same headers on every answer."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        request = Request(scope)
        refused = self._refusal(request)
        if refused is None:
            return await self._app(scope, receive, answer)
        await _error(403, refused, "Open the address that llmcli printed.")(scope, receive, answer)

    def _refusal(self, request: Request) -> str | None:
        host = request.headers.get("host", "")
        if not is_known(host, self._host):
            return "this Host is not the lab's"
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return "this Origin is not the lab's"
        if request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return "the body is not declared as application/json"
        return None


def is_known(header: str, bound: str) -> bool:
    """Whether a Host header can be the address of a server that listens on `bound`.

    A page elsewhere can point its own name at this machine (DNS rebinding); then the header holds that name.
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    if is_loopback(name):
        return True
    if is_loopback(bound):
        return False
    return is_address(name) or name in (bound.lower(), socket.gethostname().lower(), socket.getfqdn().lower())


def is_address(name: str) -> bool:
    """Whether a host is a number, which no name server can turn elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Whether a host means this machine alone."""
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


def policy(html: str) -> str:
    """The content security policy of the page: its own script and style, questions to this server, nothing else."""

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def slices(text: str) -> list[slice]:
    """ "0:8,3:9:2" as slices, one an axis. Raises UsageError for anything else."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\d{1,9}:\d{1,9}(:[1-9]\d{0,8})?", part, re.ASCII) for part in parts):
        raise UsageError(f"'{text[:80]}' is no slice", "One start:stop or start:stop:step an axis, as in 0:8,0:16.")
    return [slice(*map(int, part.split(":"))) for part in parts]


def _query(request: Request, kind: type[T]) -> T:
    return msgspec.convert(dict(request.query_params), kind, strict=False)


async def _body(request: Request, kind: type[T]) -> T:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise HTTPException(413, f"the body is larger than {MOST_BODY:,} bytes")
    return msgspec.json.decode(body, type=kind)


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _error(status: int, message: str, hint: str = "") -> Response:
    return _json({"error": message, "hint": hint}, status)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, LlmcliError):
        return _error(404 if isinstance(error, UnknownText) else 422, error.message, error.hint)
    return _error(400, f"the request is not understood: {error}")


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _fault(request: Request, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}: {error}", "This is a fault in llmcli; please report it.")


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens: on the port asked for, else on the usual one, else on any that is free.

    Raises UsageError when the port is taken or the host is none of this machine's.
    """
    for wanted in (port,) if port is not None else (PORT, 0):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, wanted, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listening = socket.socket(family, kind, protocol)
        except (OSError, UnicodeError) as error:
            said = getattr(error, "strerror", None) or "no such name"
            raise UsageError(f"--host {host}: {said}", "Leave --host out to stay local.") from None
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
            return listening
        except OSError as error:
            listening.close()
            problem = error
    at, others = (host, "--host") if port is None else (f"{host}, port {port}", "--port or --host")
    raise UsageError(f"cannot listen on {at}: {problem.strerror}", f"Choose another {others}.")


def address(listening: socket.socket, host: str) -> str:
    """The URL at which a browser on this machine finds a listening socket."""
    port = listening.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"


def make(lab: Lab, host: str = "127.0.0.1") -> uvicorn.Server:
    """A server of the lab, not yet running; what is under way has `GRACE` seconds to end when it closes."""
    return uvicorn.Server(
        uvicorn.Config(
            application(lab, host),
            log_level="critical",  # a client gets its errors as JSON, and there is no log to keep
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE,
            ws="none",
        )
    )


def serve(lab: Lab, listening: socket.socket, host: str) -> None:
    """Answer until interrupted, then return."""
    with suppress(KeyboardInterrupt), listening:  # Ctrl-C is the way to end it
        make(lab, host).run(sockets=[listening])
