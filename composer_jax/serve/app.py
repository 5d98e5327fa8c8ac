"""The web application: routes, keys, and errors as answers."""

import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from composer_jax.errors import UserError
from composer_jax.serve import chat_completions, completions, responses
from composer_jax.serve.bodies import ChatBody, CompletionBody, IdsBody, ResponsesBody, TextBody, parse_body
from composer_jax.serve.control import control_routes, weights_of
from composer_jax.serve.errors import ApiError
from composer_jax.serve.event_stream import EventStream, read_body, unless_disconnected
from composer_jax.serve.service import Client, Service
from composer_jax.serve.traffic.consent import read_headers, read_name
from composer_jax.serve.traffic.events import EventsBody

Handler = Callable[[Service, Request, Client], Awaitable[Response]]
PAGE = Path(__file__).with_name("page.html")


def new_app(
    service: Service, api_keys: tuple[str, ...] = (), control_key: str = "", hosts: tuple[str, ...] = ()
) -> Starlette:
    """Returns the application; the sampler serves as long as it runs.

    Args:
      api_keys: what clients send as `Authorization: Bearer KEY`; none lets everybody in.
      control_key: that of the control plane, which is closed without one. Sessions are recorded only with one.
      hosts: the names under which browsers may find the server, so that no page of another host can use a name of its
        own for this machine (DNS rebinding); none allows all.
    """
    service.records_sessions = bool(control_key)

    def route(path: str, handler: Handler, *methods: str, keys: tuple[str, ...] | None = api_keys) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                _check_origin(request, hosts)
                client = _identify(request, keys, service.traffic is not None)
                response = await handler(service, request, client)
            except ApiError as error:
                response = JSONResponse(error.body(), error.status)
            except ClientDisconnect:
                response = Response(status_code=499)
            service.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return Route(path, endpoint, methods=list(methods))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            async with service.sampler.serving():
                yield
        finally:
            await service.close()

    control = (control_key,) if control_key else ()
    routes = [
        route("/", _page, "GET", keys=None),
        route("/health", _health, "GET", keys=None),
        route("/metrics", _metrics, "GET", keys=None),
        route("/stats", _stats, "GET", keys=None),
        route("/v1/models", _models, "GET"),
        route("/v1/chat/completions", _endpoint(ChatBody, chat_completions), "POST"),
        route("/v1/completions", _endpoint(CompletionBody, completions), "POST"),
        route("/v1/responses", _endpoint(ResponsesBody, responses), "POST"),
        route("/events", _events, "POST"),
        route("/tokenize", _tokenize, "POST"),
        route("/detokenize", _detokenize, "POST"),
        *(route(path, handler, method, keys=control) for path, method, handler in control_routes(bool(control_key))),
    ]
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_such_page, Exception: _failure}
    )


def _check_origin(request: Request, hosts: tuple[str, ...]) -> None:
    """Raises ApiError for a browser's request from a page of another host."""
    if hosts and request.url.hostname not in hosts:
        raise ApiError(f"the host {request.url.hostname!r} is not this server; use {hosts[0]}.", status=403)
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise ApiError(f"pages of {origin} cannot use this server.", status=403)


def _identify(request: Request, keys: tuple[str, ...] | None, writes_traffic: bool) -> Client:
    """Who sent a request. Raises ApiError for a key that is not among the keys, if there are any, and wrong headers."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    session = read_name(request.headers, "X-Session-ID")
    # All keys are compared, so that the time tells nothing about them.
    known = [hmac.compare_digest(given.encode(), key.encode()) for key in keys or ()]
    if keys and not any(known):
        raise ApiError("the API key is missing or wrong; send Authorization: Bearer KEY.", status=401)
    return Client(given, session, read_headers(request.headers)) if writes_traffic else Client(given, session)


def _endpoint(kind: type[Any], form: ModuleType) -> Handler:
    """The handler of a form of answers: a module with submit, complete and stream."""

    async def handle(service: Service, request: Request, client: Client) -> Response:
        body = parse_body(kind, await read_body(service, request))
        service.check_model(body.model)
        choices = await form.submit(service, body, client)
        if body.stream:
            return EventStream(form.stream(service, body, choices), choices, service.limits.reader_seconds)
        answer = await unless_disconnected(request.receive, form.complete(service, body, choices))
        return Response(status_code=499) if answer is None else JSONResponse(answer)

    return handle


async def _page(service: Service, request: Request, client: Client) -> Response:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"))


async def _health(service: Service, request: Request, client: Client) -> Response:
    if service.sampler.error is not None:
        raise ApiError(f"the engine has ended: {service.sampler.error}; restart the server.", status=503)
    return JSONResponse({"status": "ok", **weights_of(service), **service.health})


async def _metrics(service: Service, request: Request, client: Client) -> Response:
    return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")


async def _stats(service: Service, request: Request, client: Client) -> Response:
    return JSONResponse({"model": service.name, "max_model_len": service.max_model_len, **service.metrics.summary()})


async def _models(service: Service, request: Request, client: Client) -> Response:
    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "composer_jax",
        "max_model_len": service.max_model_len,
    }
    return JSONResponse({"object": "list", "data": [model]})


async def _events(service: Service, request: Request, client: Client) -> Response:
    body = parse_body(EventsBody, await read_body(service, request))
    if service.events is None:
        raise ApiError("traffic is not written here; start the server with --traffic.", status=403)
    return JSONResponse({"stored": await service.events.add(client.key, body.events)})


async def _tokenize(service: Service, request: Request, client: Client) -> Response:
    body = parse_body(TextBody, await read_body(service, request))
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give either prompt or messages.")
    if body.messages is not None and (body.parse_special or body.add_special_tokens):
        raise ApiError("parse_special and add_special_tokens are of a prompt; leave them out with messages.")
    try:
        ids = (
            service.text.encode_prompt(body.prompt, **body.encode_options())
            if body.messages is None
            else await chat_completions.encode(service, body.messages, body.tools or [])
        )
    except UserError as error:
        raise service.prompt_error(error) from error
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len})


async def _detokenize(service: Service, request: Request, client: Client) -> Response:
    body = parse_body(IdsBody, await read_body(service, request))
    if wrong := [i for i in body.tokens if not 0 <= i < service.text.config.vocab_size]:
        raise ApiError(
            f"{wrong[0]} is not a token id; those of the model are 0 to {service.text.config.vocab_size - 1}."
        )
    return JSONResponse({"prompt": service.text.tokenizer.decode(body.tokens)})


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = f"{request.method} {request.url.path}: {error.detail}."
    return JSONResponse(ApiError(known, status=error.status_code).body(), error.status_code)


async def _failure(request: Request, error: Exception) -> Response:
    """What a client gets of an error of ours, which the log has in full."""
    return JSONResponse(ApiError("the server failed; its log says why.", status=500).body(), 500)
