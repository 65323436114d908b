"""Public promises as text: a change appears in a diff and has to be intended.

Each promise is a text in ``tests/snapshots``, written by a separate interpreter without the settings of the tests.
``RELIABLE_MQ_UPDATE_SNAPSHOTS=1 make t T=tests/test_snapshots.py`` writes the texts again.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_origin

import pytest
import typer
from sqlalchemy import create_engine

from reliable_mq.cli.app import app
from reliable_mq.core import headers
from reliable_mq.metrics import families
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox
from reliable_mq.spark import metrics as spark_metrics
from reliable_mq.stores import SQLAlchemyStore, SQLiteStore

ROOT = Path(__file__).parents[1]
SNAPSHOTS = Path(__file__).parent / "snapshots"
PUBLIC = [
    "reliable_mq",
    "reliable_mq.deadletters",
    "reliable_mq.errors",
    "reliable_mq.health",
    "reliable_mq.monitoring",
    "reliable_mq.outbox",
    "reliable_mq.settings",
    "reliable_mq.spark",
    "reliable_mq.stage",
    "reliable_mq.stores",
    "reliable_mq.testing",
    "reliable_mq.testing.fixtures",
    "reliable_mq.testing.history",
    "reliable_mq.testing.outbox_contract",
    "reliable_mq.testing.store_contract",
    "reliable_mq.topology",
    "reliable_mq.url",
    "reliable_mq.web",
]


def api() -> Iterator[str]:
    """Yield all public names.

    Each has its signature, the first line of its docstring, and the public attributes of a class.
    """
    for module in PUBLIC:
        yield f"# {module}"
        namespace = importlib.import_module(module)
        for name in sorted(namespace.__all__):
            yield from of_name(name, getattr(namespace, name))
        yield ""


def of_name(name: str, value: Any) -> Iterator[str]:
    if get_origin(value) is not None:  # the repr of an alias depends on the version of Python
        yield f"{name}: type alias"
        return
    if not inspect.isclass(value):
        yield name + (signature(value) if callable(value) else f": {type(value).__name__}")
        if inspect.isfunction(value):
            yield from summary(value)
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}" + (f"({bases})" if bases else "")
    yield from summary(value)
    if issubclass(value, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in value)
        return
    if value.__init__ is not object.__init__:
        yield f"    __init__{signature(value.__init__)}"
    for attribute in sorted(dir(value)):
        if not attribute.startswith("_") and not hasattr(Exception, attribute) and not is_inner(value, attribute):
            yield from of_attribute(attribute, inspect.getattr_static(value, attribute))


def is_inner(kind: type, attribute: str) -> bool:
    """Return whether a slot belongs to a base class that is not public."""
    owner = next(base for base in kind.__mro__ if attribute in vars(base))
    return owner is not kind and inspect.ismemberdescriptor(vars(owner)[attribute])


def of_attribute(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, classmethod | staticmethod):
        yield f"    {type(value).__name__} {name}{signature(value.__func__)}"
        yield from summary(value.__func__, "        ")
    elif inspect.isfunction(value):
        asynchronous = "async " if inspect.iscoroutinefunction(value) else ""
        yield f"    {asynchronous}{name}{signature(value)}"
        yield from summary(value, "        ")
    else:
        yield f"    {name}"
        if isinstance(value, property):
            yield from summary(value.fget, "        ")


def summary(value: Any, indent: str = "    ") -> Iterator[str]:
    """Yield the first line of a docstring, unless Python or a dataclass made it."""
    text = (value.__doc__ or "").partition("\n")[0]
    ours = str(getattr(value, "__module__", "")).startswith("reliable_mq")
    if ours and text and not text.startswith(f"{value.__name__}("):
        yield f'{indent}"{text}"'


def signature(value: Callable[..., object]) -> str:
    """Return annotations as written: type-checking imports cannot be resolved."""
    try:
        text = str(inspect.signature(value))
    except ValueError:  # a built-in method
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", text).replace("'", "")


def metric_names() -> Iterator[str]:
    found = {
        *families.FAMILIES.values(),
        *spark_metrics.FAMILIES,
    }
    for family in sorted(found, key=lambda family: family.full_name):
        yield f"{family.kind} {family.full_name}({', '.join(family.labels)})"


def header_names() -> Iterator[str]:
    for name, value in sorted(vars(headers).items()):
        if name.isupper() and not name.startswith("_"):
            yield f"{name} = {value!r}"


def of_command(path: str, command: Any) -> Iterator[str]:
    yield path
    for parameter in command.params:
        names = " ".join([*parameter.opts, *parameter.secondary_opts])
        required = ", required" if parameter.required else ""
        environment = f", {parameter.envvar}" if getattr(parameter, "envvar", None) else ""
        yield f"    {parameter.param_type_name} {names}{required}{environment}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from of_command(f"{path} {name}", inner)


def storage(directory: Path) -> Iterator[str]:
    """Yield the tables of the stores and outboxes, which exist on users' disks."""
    for url in (f"sqlite:///{directory / 'tables'}", "postgresql+psycopg://h/d", "mysql+pymysql://h/d"):
        engine = create_engine(url)
        yield f"# SQLAlchemyStore, {engine.dialect.name}"
        yield from SQLAlchemyStore(engine).ddl
        yield f"# SQLAlchemyOutbox, {engine.dialect.name}"
        yield SQLAlchemyOutbox(engine).ddl
    with SQLiteStore(directory / "store") as store:
        store.claim_many(["key"], 1.0)
    outbox = SQLiteOutbox(directory / "outbox")
    outbox.open()
    outbox.close()
    for kind in ("store", "outbox"):
        yield f"# SQLite{kind.title()}"
        with closing(sqlite3.connect(directory / kind)) as connection:
            for (statement,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"):
                yield " ".join(statement.split())


PROMISES: dict[str, Callable[[Path], Iterator[str]]] = {
    "api": lambda _: api(),
    "command_line": lambda _: of_command("reliable-mq", typer.main.get_command(app)),
    "headers": lambda _: header_names(),
    "metrics": lambda _: metric_names(),
    "storage": storage,
}


@pytest.mark.slow
def test_every_promise_is_as_it_was(tmp_path: Path) -> None:
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, cwd=ROOT)
    differences: list[str] = []
    for name in PROMISES:
        found = (tmp_path / f"{name}.txt").read_text()
        file = SNAPSHOTS / f"{name}.txt"
        if os.environ.get("RELIABLE_MQ_UPDATE_SNAPSHOTS"):
            file.write_text(found)
        expected = file.read_text() if file.exists() else ""
        if found != expected:
            lines = expected.splitlines(), found.splitlines()
            differences += [f"{name}:", *difflib.unified_diff(*lines, file.name, "now", lineterm="")]
    assert not differences, "\n".join(differences)


def write_promises(directory: Path) -> None:
    for name, lines in PROMISES.items():
        (directory / f"{name}.txt").write_text("\n".join(lines(directory)).rstrip() + "\n")


if __name__ == "__main__":
    write_promises(Path(sys.argv[1]))
