"""The API as an OpenAPI 3.1 document, made from the table of routes and the message types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from coordinator.routes import STREAM, Route
from protocol.errors import ErrorBody
from protocol.version import PROTOCOL, SOFTWARE

_REF: Final = "#/components/schemas/{name}"
_PATH_PARTS: Final = re.compile(r"\{(\w+)\}")
_WHOLE: Final = frozenset({"after", "offset", "cursor", "epoch", "clock", "attempt", "version"})


def document(routes: Sequence[Route]) -> bytes:
    """JSON of the document for these routes."""
    types = [kind for route in routes for kind in (route.takes, route.gives) if _is_type(kind)]
    types = list(dict.fromkeys([*types, ErrorBody]))
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Skerry",
                "version": SOFTWARE,
                "description": f"API of a coordinator; protocol {PROTOCOL} with its sites.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "tags": [route.listener],
        "x-skerry-role": route.role,
        "security": [] if route.role == "none" else [{"bearer": []}],
        "responses": {
            _status(route): _answer(route),
            "default": {
                "description": "Refused, with a reason.",
                "content": _content(ErrorBody),
            },
        },
    }
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.takes is not None:
        operation["requestBody"] = {"content": _content(route.takes), "required": True}
        if route.cap != STREAM:
            operation["x-skerry-body-bytes-max"] = route.cap
    return operation


def _answer(route: Route) -> dict[str, Any]:
    if route.gives is None:
        return {"description": "Done."}
    return {"description": route.summary, "content": _content(route.gives)}


def _status(route: Route) -> str:
    if route.gives is None:
        return "204"
    made = route.method == "POST" and route.path in (
        "/api/v1/jobs",
        "/api/v1/inits",
        "/api/v1/tokens",
    )
    return "201" if made else "200"


def _parameters(route: Route) -> list[Mapping[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": _schema_of(name)}
        for name in _PATH_PARTS.findall(route.path)
    ]
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": _schema_of(name)}
        for name in route.query
    ]
    return [*in_path, *in_query]


def _schema_of(name: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0} if name in _WHOLE else {"type": "string"}


def _content(kind: Any) -> dict[str, Any]:
    if _is_type(kind):
        return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
    return {str(kind): {}}


def _is_type(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _operation_id(route: Route) -> str:
    words = re.findall(r"\w+", route.path.removeprefix("/api/v1").removeprefix("/agent/v1"))
    return "_".join([route.listener, route.method.lower(), *words])
