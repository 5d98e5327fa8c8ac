"""The control plane for trainers: pausing, new weights, and what sessions recorded."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from composer_jax.errors import UserError
from composer_jax.sampler.weight_checksums import WeightMismatch
from composer_jax.serve.bodies import WeightsBody, parse_body
from composer_jax.serve.errors import ApiError
from composer_jax.serve.event_stream import read_body
from composer_jax.serve.service import Client, Service

PAUSE_MODES = ("keep", "wait", "abort")


def control_routes(
    is_open: bool,
) -> list[tuple[str, str, Callable[[Service, Request, Client], Awaitable[Response]]]]:
    """Returns (path, method, handler) of the control plane; all refuse if it is not open."""
    routes = [
        ("/pause", "POST", _pause),
        ("/resume", "POST", _resume),
        ("/update_weights", "POST", _update_weights),
        ("/abort_requests", "POST", _abort_requests),
        ("/sessions", "GET", _list_sessions),
        ("/sessions/{session:path}", "GET", _get_session),
        ("/sessions/{session:path}", "DELETE", _delete_session),
    ]
    return [(path, method, handler if is_open else _closed) for path, method, handler in routes]


async def _closed(service: Service, request: Request, client: Client) -> Response:
    raise ApiError("the control plane is closed; start the server with --control_key.", status=403)


async def _pause(service: Service, request: Request, client: Client) -> Response:
    mode = request.query_params.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise ApiError(f"mode={mode!r} is unknown; use {', '.join(PAUSE_MODES)}.", param="mode")
    await service.sampler.pause(mode)
    if not service.sampler.is_paused:
        raise ApiError("the server was resumed before it had paused.", status=409)
    return JSONResponse({"status": "paused", "mode": mode})


async def _resume(service: Service, request: Request, client: Client) -> Response:
    service.sampler.resume()
    return JSONResponse({"status": "resumed"})


async def _update_weights(service: Service, request: Request, client: Client) -> Response:
    body = parse_body(WeightsBody, await read_body(service, request))
    if service.install_weights is None:
        raise ApiError("this server takes no other weights; start it again with them.", status=501)
    if service.updating.locked():
        raise ApiError("other weights are being installed; try again later.", status=409)
    if body.mode == "drain" and service.sampler.is_paused:
        raise ApiError(
            'mode="drain" waits for requests, and the server is paused; use "keep" or "recompute".', status=409
        )
    async with service.updating:
        version = service.sampler.version + 1 if body.version is None else body.version
        if version <= service.sampler.version:
            raise ApiError(f"version={version} is not above that of the weights, {service.sampler.version}.")
        try:
            await service.install_weights(body.checkpoint, version, mode=body.mode, checksums=body.checksums)
        except WeightMismatch as error:
            held = f"The server goes on with version {service.sampler.version}."
            if service.sampler.error is not None:
                held = "The engine has ended; start it again."
            raise ApiError(f"{error} {held}", status=409, param="checksums") from error
        except UserError as error:
            raise ApiError(str(error), param="checkpoint") from error
        return JSONResponse({"status": "updated", **weights_of(service)})


def weights_of(service: Service) -> dict[str, Any]:
    """Returns version and checksums of the weights that the sampler holds, as JSON."""
    checksums = [dataclasses.asdict(one) for one in service.sampler.checksums]
    return {"weight_version": service.sampler.version, "weight_checksums": checksums}


async def _abort_requests(service: Service, request: Request, client: Client) -> Response:
    return JSONResponse({"aborted": service.abort_all()})


async def _list_sessions(service: Service, request: Request, client: Client) -> Response:
    return JSONResponse({"sessions": service.records.ids()})


async def _get_session(service: Service, request: Request, client: Client) -> Response:
    session = request.path_params["session"]
    turns = service.records.get(session)
    if turns is None:
        raise ApiError(f"no session {session!r} is recorded.", status=404)
    return JSONResponse({"session": session, "turns": turns})


async def _delete_session(service: Service, request: Request, client: Client) -> Response:
    session = request.path_params["session"]
    if not service.records.forget(session):
        raise ApiError(f"no session {session!r} is recorded.", status=404)
    return JSONResponse({"session": session, "deleted": True})
