"""The state machines of the package, drawn from their tables ``TRANSITIONS``: ``{event: {before: {after}}}``."""

from __future__ import annotations

import ast
import enum
import importlib
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import reliable_mq

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(reliable_mq.__file__).parent

_BOX, _HEIGHT, _GAP, _LANE, _PORT = 160, 44, 34, 38, 8


class Edge(NamedTuple):
    """A change of state; `before` is None where it is the first."""

    event: str
    before: enum.Enum | None
    after: enum.Enum


class Machine(NamedTuple):
    """The states of one module, in the order in which it defines them, and their changes."""

    module: str
    states: type[enum.Enum]
    edges: list[Edge]


def machines() -> Iterator[Machine]:
    """Yield the machine of every module that has a table."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        targets = [
            target
            for node in tree.body
            for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        ]
        if any(isinstance(target, ast.Name) and target.id == "TRANSITIONS" for target in targets):
            name = ".".join(("reliable_mq", *path.relative_to(ROOT).with_suffix("").parts))
            found = [*edges(importlib.import_module(name).TRANSITIONS)]
            yield Machine(name, type(found[0].after), found)


def edges(table: Mapping[str, Mapping[Any, set[Any]]]) -> Iterator[Edge]:
    """Yield the changes of a table, those of one event in the order in which the states are defined."""
    for event, changes in table.items():
        for before in sorted(changes, key=_position):
            yield from (Edge(event, before, after) for after in sorted(changes[before], key=_position))


def _position(state: enum.Enum | None) -> int:
    return -1 if state is None else [*type(state)].index(state)


def drawn(machine: Machine) -> str:
    """Return the diagram as SVG: states from top to bottom, changes forward on the right and back on the left.

    Events are numbered, as in the table below the diagram. Colours are those of the text around it.
    """
    states = [*machine.states]
    numbers = numbered(machine)
    anywhere = from_anywhere(machine)
    arcs: dict[tuple[int, int], list[int]] = {}
    for edge in machine.edges:
        if edge.before is not None and edge.event not in anywhere:
            pair = states.index(edge.before), states.index(edge.after)
            if numbers[edge.event] not in arcs.setdefault(pair, []):
                arcs[pair].append(numbers[edge.event])
    sides = {
        1: _lanes([pair for pair in arcs if pair[0] < pair[1]]),
        -1: _lanes([pair for pair in arcs if pair[0] > pair[1]]),
    }
    ports = _ports(sides, len(states))
    heights = [max(_HEIGHT, _PORT * (max(ports[side, index] for side in sides) + 2)) for index in range(len(states))]
    tops = [sum(heights[:index]) + _GAP * (index + 1) for index in range(len(states))]
    left = 24 + _LANE * (1 + max(sides[-1].values(), default=-1))
    width = left + _BOX + 24 + _LANE * (1 + max(sides[1].values(), default=-1)) + 30
    out = []
    used: dict[tuple[int, int], int] = {}

    def port(side: int, index: int) -> float:
        used[side, index] = used.get((side, index), 0) + 1
        return tops[index] + heights[index] * used[side, index] / (ports[side, index] + 1)

    for side, lanes in sides.items():
        for (before, after), lane in sorted(lanes.items(), key=lambda item: (item[1], item[0])):
            start = left + (_BOX if side > 0 else 0)
            far = start + side * (24 + _LANE * lane)
            upper, lower = port(side, before), port(side, after)
            turn = 6 if lower > upper else -6
            out.append(
                f'<path d="M{start} {upper:.1f}H{far - side * 6}Q{far} {upper:.1f} {far} {upper + turn:.1f}'
                f'V{lower - turn:.1f}Q{far} {lower:.1f} {far - side * 6} {lower:.1f}H{start + side * 2}" '
                'fill="none" stroke="currentColor" stroke-opacity=".55" marker-end="url(#arrow)"/>'
            )
            label = ",".join(map(str, arcs[before, after]))
            middle = (upper + lower) / 2 + 4
            out.append(f'<text x="{far}" y="{middle:.1f}" class="event" text-anchor="middle">{label}</text>')
    for index, state in enumerate(states):
        first = any(edge.before is None and edge.after is state for edge in machine.edges)
        loops = arcs.get((index, index))
        more = f" ↻ {','.join(map(str, loops))}" if loops else ""
        always = [str(numbers[event]) for event, after in anywhere.items() if after is state]
        middle = tops[index] + heights[index] / 2
        out.append(
            f'<rect x="{left}" y="{tops[index]}" width="{_BOX}" height="{heights[index]}" rx="6" class="state"'
            f' stroke-width="{2.5 if first or index == 0 else 1}"/>'
            f'<text x="{left + _BOX / 2}" y="{middle + (-2 if always else 5)}" text-anchor="middle">'
            f"{escape(state.name)}{more}</text>"
        )
        if always:
            out.append(
                f'<text x="{left + _BOX / 2}" y="{middle + 14}" text-anchor="middle" class="event">'
                f"from any other: {', '.join(always)}</text>"
            )
    height = tops[-1] + heights[-1] + _GAP
    return (
        f'<svg class="states" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(machine.states.__name__)}: the table below lists the same changes">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
        f"{''.join(out)}</svg>"
    )


def from_anywhere(machine: Machine) -> dict[str, enum.Enum]:
    """Return the events that lead from every other state to one, with that state; the last states do not count."""
    befores = {edge.before for edge in machine.edges}
    found = {}
    for event in numbered(machine):
        own = [edge for edge in machine.edges if edge.event == event]
        afters = {edge.after for edge in own}
        others = set(machine.states) & befores - afters
        if len(afters) == 1 and len(others) > 2 and others <= {edge.before for edge in own}:
            found[event] = own[0].after
    return found


def numbered(machine: Machine) -> dict[str, int]:
    """Return the number of each event, in the order of the table."""
    events = dict.fromkeys(edge.event for edge in machine.edges)
    return {event: number for number, event in enumerate(events, 1)}


def _lanes(pairs: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return a lane for each arc, the shortest arcs innermost, so that no two overlap in one."""
    lanes: dict[tuple[int, int], int] = {}
    for pair in sorted(pairs, key=lambda pair: (abs(pair[0] - pair[1]), pair)):
        low, high = sorted(pair)
        taken = {lane for other, lane in lanes.items() if max(low, min(other)) <= min(high, max(other))}
        lanes[pair] = next(lane for lane in range(len(pairs) + 1) if lane not in taken)
    return lanes


def _ports(sides: Mapping[int, Iterable[tuple[int, int]]], count: int) -> dict[tuple[int, int], int]:
    """Return how many arcs begin or end at each side of each state."""
    return {
        (side, index): sum(pair.count(index) for pair in pairs)
        for side, pairs in sides.items()
        for index in range(count)
    }
