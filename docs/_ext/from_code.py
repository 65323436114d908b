"""Directives whose content is read from the code, so that a page cannot go stale.

``options``          the options of a class, with their defaults: from its signature and the ``Args`` of its docstring
``metrics``          the metrics of an exporter: from its families
``headers``          the headers of ours: from the docstring of their module
``commands``         the command line: from the application itself
``state-machines``   the states of everything that has some, as diagrams and tables
``error-messages``   the texts of the errors, by class: from the source

Each makes Markdown and has it parsed in place of itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import state_machines
import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

import reliable_mq
from reliable_mq import errors
from reliable_mq.cli.app import app as command_line
from reliable_mq.core import headers
from reliable_mq.metrics.families import FAMILIES
from reliable_mq.spark import metrics as spark_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

FIELD = type(errors.Difference.argument)
SOURCE = Path(reliable_mq.__file__).parent


def cell(text: str) -> str:
    """Return a docstring's text as one cell of a table in Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


class FromCode(SphinxDirective):
    """Parse what ``lines`` yields in place of the directive."""

    has_content = False

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the code may have changed where the page has not
        section = nodes.section()
        self.state.nested_parse(StringList([*self.lines()], source="code"), 0, section, match_titles=True)
        return section.children


def arguments_of(docstring: str) -> dict[str, str]:
    """Return the ``Args`` of a docstring in Google's style."""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(docstring), re.MULTILINE | re.DOTALL)
    if found is None:
        return {}
    return dict(re.findall(r"^    \*{0,2}(\w+): (.*?)(?=^    \S|\Z)", found[1], re.MULTILINE | re.DOTALL))


def shown_default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "-"
    if repr(default) == "<factory>":  # of a dataclass; those of ours make an empty mapping
        return "`{}`"
    if isinstance(default, Enum):
        return f"`{default.name}`"
    if repr(default).isupper():  # a sentinel, shown by its name
        return f"`{default!r}`"
    if isinstance(default, int) and not isinstance(default, bool) and default and default % (1024 * 1024) == 0:
        return f"{default // (1024 * 1024)} MiB"
    if isinstance(default, (str, int, float, tuple, frozenset, type(None))):
        return f"`{default!r}`"
    return f"`{type(default).__name__}`"


class Options(FromCode):
    """The options of a class: name, default, meaning."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        module, _, name = self.arguments[0].rpartition(".")
        owner = getattr(importlib.import_module(module), name)
        documented = arguments_of(owner.__doc__ or "") or arguments_of(owner.__init__.__doc__ or "")
        rows = []
        for parameter in inspect.signature(owner).parameters.values():
            if parameter.name not in documented:
                raise self.error(f"{owner.__name__} does not document {parameter.name}")
            rows.append((f"`{parameter.name}`", shown_default(parameter.default), cell(documented[parameter.name])))
        yield from table(("option", "default", "meaning"), rows)


class Metrics(FromCode):
    """The metrics whose name begins so, with their kind, labels and help."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        every = [*FAMILIES.values(), *spark_metrics.FAMILIES]
        found = {family.full_name: family for family in every if family.name.startswith(self.arguments[0])}
        common = set.intersection(*(set(family.labels) for family in found.values()))
        if common:
            yield from (f"Labels of each: {', '.join(f'`{label}`' for label in sorted(common))}.", "")
        rows = []
        for name, family in sorted(found.items()):
            own = "".join(f" By `{label}`." for label in family.labels if label not in common)
            suffix = "_total" if family.kind == "counter" else ""
            rows.append((f"`{name}{suffix}`", family.kind, cell(family.documentation) + own))
        yield from table(("metric", "kind", "meaning"), rows)


class Headers(FromCode):
    """The headers that this package writes, with their types."""

    def lines(self) -> Iterator[str]:
        ruler = r"^=+ =+ =+$\n"
        documented = re.search(f"{ruler}.*?{ruler}(.*?){ruler}", headers.__doc__ or "", re.MULTILINE | re.DOTALL)
        if documented is None:
            raise self.error("the table of headers is not where it was")
        rows = []
        for constant, kind, meaning in re.findall(r"^(\w+) +(\S+) +(.*(?:\n {10,}.*)*)", documented[1], re.MULTILINE):
            told = re.sub(r", see\s+:mod:`[^`]*`", "", meaning)
            told = told.replace("`FORMAT_VERSION`", str(headers.FORMAT_VERSION))
            rows.append((f"`{getattr(headers, constant)}`", kind, cell(told)))
        yield from table(("header", "type", "meaning"), rows)


class Commands(FromCode):
    """Every command with its arguments and options, as ``--help`` has them."""

    def lines(self) -> Iterator[str]:
        yield from self.described(typer.main.get_command(command_line), "reliable-mq")

    def described(self, command: Any, path: str) -> Iterator[str]:
        for name, child in sorted(getattr(command, "commands", {}).items()):
            if getattr(child, "commands", None):
                yield from self.described(child, f"{path} {name}")
                continue
            arguments = [each for each in child.params if each.param_type_name == "argument"]
            usage = " ".join([path, name, *map(metavar, arguments)])
            yield from (f"## {f'{path} {name}'.removeprefix('reliable-mq ')}", "", "```sh", usage, "```", "")
            yield from (*(options_as_code(line.strip()) for line in (child.help or "").splitlines()), "")
            rows = [
                (
                    ", ".join(f"`{name}`" for name in [*each.opts, *each.secondary_opts])
                    if each.param_type_name == "option"
                    else f"`{each.name.upper()}`",
                    options_as_code(cell(each.help or "")) + stated_default(each),
                )
                for each in child.params
                if each.name != "help"
            ]
            yield from (*table(("argument or option", "meaning"), rows), "")


def stated_default(parameter: Any) -> str:
    """Return a sentence with the default of an option, unless its help has it or it is a flag that is off."""
    if parameter.default in (None, False, "", ()) or "Default:" in (parameter.help or ""):
        return ""
    return f" Default: `{parameter.default}`."


def options_as_code(text: str) -> str:
    """Mark options as code, outside of what is marked already."""
    return re.sub(r"(`[^`]*`)|(?<!\w)(--[a-z-]+)", lambda found: found[1] or f"`{found[2]}`", text)


def metavar(argument: Any) -> str:
    shown = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return shown if argument.required else f"[{shown}]"


class StateMachines(FromCode):
    """A diagram, the states and the changes of each state machine."""

    def lines(self) -> Iterator[str]:
        for machine in state_machines.machines():
            numbers = state_machines.numbered(machine)
            yield from (f"## {machine.states.__name__}", "", cell(vars(machine.states).get("__doc__") or ""), "")
            yield from (f"Defined in `{machine.module}`.", "", f"<div>{state_machines.drawn(machine)}</div>", "")
            yield from table(
                ("state", "meaning"), [(f"`{state.name}`", cell(str(state.value))) for state in machine.states]
            )
            changes: dict[str, dict[str, list[str]]] = {}
            for edge in machine.edges:
                before = "-" if edge.before is None else f"`{edge.before.name}`"
                changes.setdefault(edge.event, {}).setdefault(f"`{edge.after.name}`", []).append(before)
            yield from ("", *table(("", "event", "changes"), [*self.rows(numbers, changes)]), "")

    def rows(self, numbers: dict[str, int], changes: dict[str, dict[str, list[str]]]) -> Iterator[tuple[str, ...]]:
        for event, afters in changes.items():
            told = "; ".join(f"{', '.join(befores)} → {after}" for after, befores in afters.items())
            yield str(numbers[event]), cell(event), told


class ErrorMessages(FromCode):
    """The texts that errors of a class are raised with; ``…`` stands for a value."""

    required_arguments = 1
    final_argument_whitespace = True
    kinds: ClassVar[set[str]] = set(errors.__all__)

    def lines(self) -> Iterator[str]:
        wanted = set(self.arguments[0].split())
        if not wanted <= self.kinds:
            raise self.error(f"no errors: {wanted - self.kinds}")
        yield from (f"- {text}" for text in sorted({text for kind, text in raised() if kind in wanted}, key=str.lower))


def raised() -> Iterator[tuple[str, str]]:
    """Yield the class and the text of each error that the package makes where it raises it."""
    for path in sorted(SOURCE.rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ErrorMessages.kinds:
                text = template(node.args[0]) if node.args else ""
                if text.strip("… "):
                    yield node.func.id, "`" + text.replace("`", "") + "`"


def template(node: ast.expr) -> str:
    """Return the text of an expression, with ``…`` in place of each value; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.IfExp):
        return template(node.body)
    if isinstance(node, ast.BinOp):
        return template(node.left) + (template(node.right) or "…")
    return ""


def without_colon(_app: Sphinx, what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Replace the colon in the first line of a property, up to which napoleon reads its type."""
    if what in {"attribute", "property"} and lines:
        lines[0] = lines[0].replace(": ", " - ", 1)


def without_fields(_app: Sphinx, _what: str, _name: str, value: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave out the fields of named tuples, which the docstring of their class describes."""
    return True if isinstance(value, FIELD) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-skip-member", without_fields)
    app.connect("autodoc-process-docstring", without_colon, priority=100)  # before napoleon
    app.add_directive("options", Options)
    app.add_directive("metrics", Metrics)
    app.add_directive("headers", Headers)
    app.add_directive("commands", Commands)
    app.add_directive("state-machines", StateMachines)
    app.add_directive("error-messages", ErrorMessages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
