"""What the run's programs order of the fleet, over HTTP: `/muster/rollout`, `/muster/rollout/...`.

An order that was taken is carried out to its end, even if its client leaves before.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.rollout.access import Access
from tasks.rollout.forwarding import Evidence, refused
from tasks.rollout.refusals import Refusal, bad
from tasks.rollout.router import Router
from tasks.rollout.topology import Ask
from tasks.spec.errors import MusterError

_log = logging.getLogger(__name__)

PREFIX = "/muster"
_BODY_BYTES = 1024 * 1024


class FleetFacade(Evidence, Protocol):
    """What the gateway needs of the fleet. Each answer is JSON."""

    @property
    def router(self) -> Router: ...
    def snapshot(self) -> dict[str, Any]: ...
    async def barrier(self) -> dict[str, Any]: ...
    async def restore(self) -> dict[str, Any]: ...
    def weights(
        self,
        version: int,
        ranks: tuple[int, ...] | None = None,
        epochs: Mapping[int, int] | None = None,
    ) -> dict[str, Any]: ...
    async def drain(self, timeout_s: float) -> dict[str, Any]: ...
    async def broadcast(self, ask: Ask, timeout_s: float) -> dict[Any, Any]: ...


class _Order(BaseModel):
    """A body. Unknown keys are refused: a misspelt one would order something else."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


M = TypeVar("M", bound=_Order)


class _Weights(_Order):
    version: int = Field(ge=0)
    ranks: tuple[int, ...] | None = None
    epochs: dict[int, int] | None = None


class _Drain(_Order):
    timeout_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)


class _Broadcast(_Order):
    method: Annotated[str, Field(pattern="^[A-Z]+$")] = "POST"
    path: Annotated[str, Field(pattern="^/")]
    body: dict[str, Any] | None = None
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Orders:
    """Answers the requests below `/muster`."""

    def __init__(self, fleet: FleetFacade, access: Access) -> None:
        self._fleet = fleet
        self._access = access
        self._orders: dict[str, Callable[[bytes], Awaitable[Mapping[Any, Any]]]] = {
            f"{PREFIX}/rollout/barrier": self._barrier,
            f"{PREFIX}/rollout/restore": self._restore,
            f"{PREFIX}/rollout/weights": self._weights,
            f"{PREFIX}/rollout/drain": self._drain,
            f"{PREFIX}/rollout/broadcast": self._broadcast,
        }
        #: Orders that are being carried out, kept from the garbage collector.
        self._under_way: set[asyncio.Task[Mapping[Any, Any]]] = set()

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """An answer to any request whose path begins with `/muster`."""
        path = request.raw_path.partition("?")[0].rstrip("/")
        if path == f"{PREFIX}/health" and request.method in ("GET", "HEAD"):
            # To anybody: who asks whether a component lives, as a supervisor does, has no token,
            # and this tells nothing else.
            return _json({"ok": True, "ready": self._fleet.snapshot().get("ready", False)})
        order = self._orders.get(path)
        if refusal := self._access.refusal(request.headers, is_order=order is not None):
            return refused(refusal)
        if order is not None:
            if request.method != "POST":
                return _wrong_method(path, "POST")
            return await self._obey(order, request)
        if path not in (f"{PREFIX}/health", f"{PREFIX}/rollout"):
            known = ", ".join([f"{PREFIX}/health", f"{PREFIX}/rollout", *self._orders])
            message = f"there is no {path}; there are {known}"
            return refused(Refusal(status=404, type="not_found", message=message))
        if request.method not in ("GET", "HEAD"):
            return _wrong_method(path, "GET")
        return _json(self._fleet.snapshot())

    async def stop(self) -> None:
        """Leave no order half done by us: what is under way is told to end, and waited for."""
        for task in tuple(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _obey(
        self,
        order: Callable[[bytes], Awaitable[Mapping[Any, Any]]],
        request: web.BaseRequest,
    ) -> web.Response:
        if (request.content_length or 0) > _BODY_BYTES:
            return refused(bad(f"an order has at most {_BODY_BYTES} bytes"))
        body = b""
        while piece := await request.content.readany():
            body += piece
            if len(body) > _BODY_BYTES:
                return refused(bad(f"an order has at most {_BODY_BYTES} bytes"))

        async def carry_out() -> Mapping[Any, Any]:
            return await order(body)

        task = asyncio.create_task(carry_out(), name=request.raw_path)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return _json(await asyncio.shield(task))
        except _Refused as error:
            return refused(error.refusal)
        except KeyError as error:
            return refused(bad(str(error.args[0]) if error.args else "unknown key"))
        except ValueError as error:
            return refused(bad(str(error)))
        except MusterError as error:
            return refused(Refusal(status=409, type="refused", message=str(error)))
        except asyncio.CancelledError:
            if not task.done():
                _log.warning("the client of %s has left; the order goes on", request.raw_path)
                task.add_done_callback(_log_end)
            elif task.cancelled():
                message = "the fleet is being stopped"
                return refused(Refusal(status=503, type="stopping", message=message))
            raise
        except Exception as error:
            _log.exception("the order %s failed", request.raw_path)
            message = f"{type(error).__name__}: {error}; the fleet's log has the details"
            return refused(Refusal(status=500, type="failed", message=message))

    async def _barrier(self, body: bytes) -> Mapping[Any, Any]:
        _read(_Order, body)
        return await self._fleet.barrier()

    async def _restore(self, body: bytes) -> Mapping[Any, Any]:
        _read(_Order, body)
        return await self._fleet.restore()

    async def _weights(self, body: bytes) -> Mapping[Any, Any]:
        order = _read(_Weights, body)
        return self._fleet.weights(order.version, order.ranks, order.epochs)

    async def _drain(self, body: bytes) -> Mapping[Any, Any]:
        return await self._fleet.drain(_read(_Drain, body).timeout_s)

    async def _broadcast(self, body: bytes) -> Mapping[Any, Any]:
        order = _read(_Broadcast, body)
        ask = Ask(method=order.method, path=order.path, body=order.body)
        return await self._fleet.broadcast(ask, order.timeout_s)


def _read(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body.strip() or b"{}")
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        )
        takes = ", ".join(
            f"{name} (needed)" if field.is_required() else name
            for name, field in model.model_fields.items()
        )
        raise _Refused(bad(f"{faults}. It takes a JSON object: {takes or 'empty'}")) from error


def _log_end(task: asyncio.Task[Mapping[Any, Any]]) -> None:
    """Of an order whose client has left, so that nobody else hears of it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the order %s, whose client has left, failed", task.get_name(), exc_info=error)


def _wrong_method(path: str, right: str) -> web.Response:
    return refused(Refusal(status=405, type="bad_request", message=f"{path} takes {right} only"))


def _json(content: Mapping[Any, Any]) -> web.Response:
    return web.Response(
        body=json.dumps(content).encode(), headers={"Content-Type": "application/json"}
    )
