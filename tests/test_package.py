"""The package as a whole: its metadata and the cost of its import."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import reliable_mq

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_a_release_and_the_changelog_tells_of_it() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_typed() -> None:
    assert (Path(reliable_mq.__file__).parent / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_the_files_that_the_metadata_names_exist() -> None:
    assert (ROOT / PROJECT["readme"]).exists()
    assert all((ROOT / name).exists() for name in PROJECT["license-files"])


def test_every_script_is_a_function_of_the_package() -> None:
    assert PROJECT["scripts"]
    for entry in PROJECT["scripts"].values():
        module, _, function = entry.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_every_module_can_be_imported() -> None:
    """With all extras installed, no module depends on the order of imports."""
    for module in pkgutil.walk_packages(reliable_mq.__path__, "reliable_mq."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def test_importing_the_package_needs_no_extra_and_no_other_api() -> None:
    """Extras and the other API are not loaded, and no thread is started."""
    code = "import reliable_mq, sys, threading; print(*sys.modules); assert threading.active_count() == 1"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "reliable_mq" in loaded
    assert not loaded & {"aio_pika", "aiormq", "matplotlib", "pytest", "rich", "typer"}


@pytest.mark.parametrize(
    ("missing", "statement", "extra"),
    [
        ("sqlalchemy", "from reliable_mq.outbox import SQLAlchemyOutbox", "sql"),
        ("sqlalchemy", "from reliable_mq.stores import SQLAlchemyStore", "sql"),
        ("redis", "from reliable_mq.stores import RedisStore", "redis"),
        ("docker", "from reliable_mq.testing import RabbitMQ", "testing"),
        ("starlette", "from reliable_mq.web import DeadLetterApp", "web"),
        ("jinja2", "from reliable_mq.web import DeadLetterApp", "web"),
    ],
)
def test_a_missing_extra_is_named_by_the_error(missing: str, statement: str, extra: str) -> None:
    code = (
        "import sys\n"
        "from reliable_mq import ConfigurationError\n"
        f"sys.modules[{missing!r}] = None\n"
        f"try:\n    {statement}\nexcept ConfigurationError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert missing in done.stdout
    assert done.stdout.endswith(f"pip install 'reliable-mq[{extra}]'\n")
