"""The application: endpoints, and errors as answers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from runtime_min.serve.errors import ApiError
from runtime_min.serve.http import Gate, Gone, failure, to_stderr
from runtime_min.serve.server import Server
from specs.errors import InputError

# The page loads nothing from elsewhere and sends nothing elsewhere.
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "frame-ancestors 'none'"
)


def app_of(server: Server, log: Callable[[str], None] = to_stderr) -> FastAPI:
    """The ASGI application. Its lifespan is the engine's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.pump.start()
        try:
            yield
        finally:
            await server.pump.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    _routes(app, server)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(InputError, _input_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Gone, _gone)
    app.add_exception_handler(Exception, _crash)
    app.add_middleware(Gate, keys=server.rules.keys, log=log)
    return app


def _routes(app: FastAPI, server: Server) -> None:
    page = files("runtime_min.serve").joinpath("page.html").read_bytes()
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    app.add_api_route("/v1/completions", server.completions, methods=["POST"])

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model(server.served.name)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return server.model(name)

    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> Response:
        return server.ready()

    @app.get("/health")
    async def health(deep: bool = False) -> Response:
        return await server.health(deep)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    async def index() -> Response:
        return Response(page, headers={"Content-Security-Policy": POLICY}, media_type="text/html; charset=utf-8")


def _api_error(_: Request, e: Exception) -> Response:
    assert isinstance(e, ApiError)
    return failure(e)


def _input_error(_: Request, e: Exception) -> Response:
    return failure(ApiError(400, str(e)))


def _http_error(_: Request, e: Exception) -> Response:
    assert isinstance(e, HTTPException)
    return failure(ApiError(e.status_code, str(e.detail)))


def _gone(_: Request, e: Exception) -> Response:
    return Response(status_code=499)


def _crash(request: Request, e: Exception) -> Response:
    return failure(
        ApiError(500, f"something went wrong here; the server's log has it under {request.state.request_id}")
    )
