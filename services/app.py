"""Assembles the ASGI application: routes, middleware, error handlers. No logic of its own."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.errors import from_status
from services.keys import Keyring
from services.limits import RATE_LIMIT_HEADERS
from services.middleware import OPEN_PATHS, ApiKeys, Edge
from services.routes.chat import Chat
from services.routes.completions import Completions
from services.routes.description import Description
from services.routes.messages import CountTokens, Messages
from services.routes.metrics import MetricsRoute
from services.routes.requests import RequestRoutes
from services.routes.responses import KeptResponses, Responses
from services.routes.status import StatusRoutes
from services.routes.text import Detokenize, Tokenize
from services.state import ApiState

EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", "warning", *RATE_LIMIT_HEADERS)
"""What scripts in a browser may read beside the body."""


def build_app(state: ApiState, keyring: Keyring) -> Starlette:
    """The application. With keys, everything but the open paths needs one of them."""
    open_paths = OPEN_PATHS | ({"/metrics"} if state.config.metrics_open else frozenset())
    description = Description(state, needs_key=bool(keyring), open_paths=open_paths)
    status = StatusRoutes(state)
    kept = KeptResponses(state)
    routes = [
        Route("/v1/completions", Completions(state), methods=["POST"]),
        Route("/v1/chat/completions", Chat(state), methods=["POST"]),
        Route("/v1/messages", Messages(state), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokens(state), methods=["POST"]),
        Route("/v1/responses", Responses(state), methods=["POST"]),
        Route("/v1/responses/{id}", kept.one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", kept.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", kept.input_items, methods=["GET"]),
        Route("/v1/models", status.models, methods=["GET"]),
        Route("/v1/models/{name:path}", status.model, methods=["GET"]),
        Route("/v1/requests/{id:path}/timeline", RequestRoutes(state).timeline, methods=["GET"]),
        Route("/tokenize", Tokenize(state), methods=["POST"]),
        Route("/detokenize", Detokenize(state), methods=["POST"]),
        Route("/health", status.health, methods=["GET"]),
        Route("/ready", status.ready, methods=["GET"]),
        Route("/version", status.version, methods=["GET"]),
        Route("/load", status.load, methods=["GET"]),
        Route("/metrics", MetricsRoute(state).metrics, methods=["GET"]),
        Route("/openapi.json", description.openapi, methods=["GET"]),
    ]
    middleware: list[Middleware] = []
    if state.config.allowed_origins:  # outermost, so that a browser may also read errors
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(state.config.allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    middleware.append(Middleware(Edge, metrics=state.metrics, paths=[route.path for route in routes]))
    if keyring:
        middleware.append(Middleware(ApiKeys, keyring=keyring, open_paths=open_paths, wall=state.wall))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own 404 and 405 as all other errors: the outermost layer writes them."""
    assert isinstance(error, HTTPException)
    detail = ""
    if error.status_code == 404:
        detail = f"There is no route {request.url.path[:200]}"
    elif error.status_code == 405:
        detail = f"{request.method} is not allowed on {request.url.path[:200]}"
    made = from_status(error.status_code, detail)
    made.headers |= error.headers or {}
    raise made
