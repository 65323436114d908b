"""OpenTelemetry's model of messaging spans, and a check of spans against it.

The model is in ``conventions``. Its version is the one that the spans name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from opentelemetry.trace import StatusCode

from reliable_mq.tracing.tracing import SCHEMA_URL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["ALSO", "OURS", "REGISTRY", "SPANS", "flaws"]

#: Attributes of this package: the conventions have no name for them.
OURS: Final[Mapping[str, type]] = {
    "reliable_mq.outcome": str,  # a publish has five outcomes, and three of them are errors
    "reliable_mq.attempt": int,  # messaging.message.delivery_count is not in the conventions
    "reliable_mq.attempts": int,
    "reliable_mq.possible_duplicate": bool,
    "reliable_mq.redelivered": bool,
    "reliable_mq.reply.code": int,  # error.type is the class of the error
    "reliable_mq.reply.text": str,
}
#: Registry attributes on spans for which the model does not list them. They allow filtering as on the other spans.
ALSO: Final[Mapping[str, set[str]]] = {
    "messaging.create.producer": {"messaging.client.id", "messaging.rabbitmq.destination.routing_key"},
    "messaging.send.client": {"messaging.rabbitmq.destination.routing_key"},
    "messaging.settle.client": {"messaging.rabbitmq.destination.routing_key"},
}
_TYPES: Final = {"string": str, "int": int, "boolean": bool, "double": float}


def _file(name: str) -> Mapping[str, Any]:
    path = Path(__file__).parent / "conventions" / SCHEMA_URL.rpartition("/")[2] / f"{name}.yaml"
    found: Mapping[str, Any] = yaml.safe_load(path.read_text())
    return found


def _registry() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for area in ("messaging", "error", "network", "server"):
        file = _file(f"{area}/registry")
        for group in file.get("groups", [file]):  # the older or the newer format of such a file
            for attribute in group["attributes"]:
                yield attribute.get("id") or attribute["key"], attribute


def _spans() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the types of spans with the level of each listed attribute.

    RabbitMQ's own type takes precedence.
    """
    general, ours = _file("messaging/spans"), _file("messaging/rabbitmq")
    groups = {group["id"]: group for file in (general, ours) for group in file["attribute_groups"]}

    def listed(group: Mapping[str, Any], found: dict[str, str]) -> dict[str, str]:
        for each in group["attributes"]:
            if "ref_group" in each:
                listed(groups[each["ref_group"]], found)
            else:
                level = each.get("requirement_level", found.get(each["ref"], "recommended"))
                found[each["ref"]] = level if isinstance(level, str) else next(iter(level))
        return found

    refined = {refinement["ref"]: refinement for refinement in ours["span_refinements"]}
    for span in general["spans"]:
        yield span["type"], listed(refined.get(span["type"], {"attributes": ()}), listed(span, {}))


#: The attributes by name, and the attributes of each type of span with their requirement levels.
REGISTRY: Final = dict(_registry())
SPANS: Final = dict(_spans())


def flaws(span: ReadableSpan) -> Iterator[str]:
    """Yield the differences between a span and the model."""
    attributes = span.attributes or {}
    kind = f"messaging.{attributes.get('messaging.operation.type')}.{span.kind.name.lower()}"
    if kind not in SPANS:
        yield f"there is no span {kind}"
        return
    for name, level in SPANS[kind].items():
        if level == "required" and name not in attributes:
            yield f"{name} is required"
    if (span.status.status_code is StatusCode.ERROR) != ("error.type" in attributes):
        yield "error.type goes with a failure"
    if span.name != f"{attributes['messaging.operation.name']} {attributes['messaging.destination.name']}":
        yield f"the name of the span is {span.name!r}"
    for name, value in attributes.items():
        if name not in OURS and name not in SPANS[kind] and name not in ALSO.get(kind, ()):
            yield f"{name} is not of {kind}"
        yield from _flaws_of_value(name, value)
    for event in span.events:
        if event.name == "exception":  # created by the SDK
            continue
        if not event.name.startswith("reliable_mq."):
            yield f"there is an event {event.name}"
        for name, value in (event.attributes or {}).items():
            yield from _flaws_of_value(name, value)
    for link in span.links:
        if link.attributes:
            yield "a link has attributes"


def _flaws_of_value(name: str, value: object) -> Iterator[str]:
    wanted: Any = OURS.get(name)
    if wanted is None and (attribute := REGISTRY.get(name)) is not None:
        if "deprecated" in attribute:
            yield f"{name} is deprecated"
        wanted = attribute["type"]
        if isinstance(wanted, dict):  # listed values; the list is complete except for error types
            current = [member["value"] for member in wanted["members"] if "deprecated" not in member]
            if name != "error.type" and value not in current:
                yield f"{name} is {value!r}, and not of {current}"
            wanted = "string"
        wanted = _TYPES[wanted]
    if type(value) is not wanted:
        yield f"{name} is {value!r}, and not {wanted}"
