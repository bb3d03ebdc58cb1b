"""The OpenAPI document agrees with the table it is made from."""

from __future__ import annotations

import json
import re
from typing import Any

from coordinator.openapi import document
from coordinator.routes import STREAM, TABLE

DOCUMENT: dict[str, Any] = json.loads(document(TABLE))


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    if isinstance(node, list):
        return set().union(*(references(child) for child in node))
    return set()


def test_every_route_is_in_the_document_and_nothing_else():
    found = {(m.upper(), path) for path, ops in DOCUMENT["paths"].items() for m in ops}
    assert found == {(route.method, route.path) for route in TABLE}


def test_every_reference_leads_somewhere():
    schemas = DOCUMENT["components"]["schemas"]
    names = {ref.removeprefix("#/components/schemas/") for ref in references(DOCUMENT)}
    assert names <= set(schemas)
    assert {"JobView", "Receipt", "ErrorBody"} <= names


def test_operations_say_role_parameters_and_caps():
    ids = set()
    for route in TABLE:
        operation = DOCUMENT["paths"][route.path][route.method.lower()]
        ids.add(operation["operationId"])
        assert operation["x-skerry-role"] == route.role
        assert bool(operation["security"]) == (route.role != "none")
        in_path = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", route.path))
        if route.takes is not None and route.cap != STREAM:
            assert operation["x-skerry-body-bytes-max"] == route.cap
    assert len(ids) == len(TABLE)


def test_the_document_has_the_form_of_openapi():
    assert DOCUMENT["openapi"].startswith("3.1")
    assert DOCUMENT["info"]["title"] == "Skerry"
    assert DOCUMENT["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
