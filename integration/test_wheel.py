"""The wheel as a user installs it: its content, and use outside of the tree."""

from __future__ import annotations

import os
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from integration.support.programs import output_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(directory), str(ROOT))
    (made,) = directory.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel, which uses the installed dependencies."""
    directory = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-compile", "--target", str(directory), str(wheel))
    return directory


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    output_of(command, env=os.environ, timeout=110)


def run(site: Path, *command: str) -> str:
    """Run a command outside of the tree with the installed wheel."""
    environment = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1", "COLUMNS": "200"}
    return output_of(command, cwd=site, env=environment)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """It has every module, the web files, the type marker and the license.

    It has no tests and no harness.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "reliable_mq").rglob("*.py")}
    page = (path for part in ("static", "templates") for path in (ROOT / "reliable_mq" / "web" / part).rglob("*.*"))
    tree |= {str(path.relative_to(ROOT)) for path in page}
    tree.remove("reliable_mq/spark/autoregister.py")
    tree.add("pyspark_reliable_mq.py")  # the module that Spark looks for
    own = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert own == tree | {"reliable_mq/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_metadata_says_what_it_is(wheel: Path) -> None:
    """The README is the description; dependencies beyond the README's are extras."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert fields["Name"] == "reliable-mq"
    assert fields["Version"] == "0.1.0"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload() == (ROOT / "README.md").read_text()
    needed = {name for name in fields.get_all("Requires-Dist", []) if "extra ==" not in name}
    assert needed == {
        # the minor releases whose private layers the driver tests check
        "aiormq<7.3,>=7.2.4",
        "pika<1.5,>=1.4.4",
        "aio-pika<11,>=10.2",
        "prometheus-client>=0.20",
        "tenacity>=9.0",
    }
    assert {"all", "cli", "testing"} <= set(fields.get_all("Provides-Extra", []))


def test_the_installed_package_knows_its_version(site: Path) -> None:
    """The broker and dead letters get it."""
    code = "import reliable_mq._util.version as identity; print(identity.__file__, identity.OWN_VERSION)"
    file, version = run(site, sys.executable, "-c", code).split()
    assert Path(file).is_relative_to(site)
    assert version == "0.1.0"


def test_the_command_is_installed(site: Path) -> None:
    """Every command that the README names exists."""
    printed = run(site, str(site / "bin" / "reliable-mq"), "--help")
    assert all(command in printed for command in ("demo", "doctor", "publish", "consume"))
