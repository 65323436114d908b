"""rabbitmq-c, the C client, which is close to the broker's maximum rate.

It is compiled here, from rabbitmq_c.c in this directory.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from integration.bench.contender import Contender, Role, Unavailable
from integration.bench.paths import BUILD

SOURCE = Path(__file__).with_suffix(".c")
COMPILE_DEADLINE = 60.0
INSTALL_DEADLINE = 300.0


def publisher() -> list[str]:
    return [str(compile_program()), "publish"]


def consumer() -> list[str]:
    return [str(compile_program()), "consume"]


def compile_program() -> Path:
    """Compile the program, and install its dependencies if this is allowed.

    Raises:
        Unavailable: If there is no compiler or no librabbitmq, or the program does not compile.
    """
    try:
        return compiled()
    except Unavailable:
        if not installed():
            raise
        return compiled()


def compiled() -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        raise Unavailable("there is no C compiler (Debian: gcc and librabbitmq-dev)")
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / SOURCE.stem
    command = [compiler, "-O2", "-Wall", "-o", str(target), str(SOURCE), "-lrabbitmq"]
    done = run(command, deadline=COMPILE_DEADLINE)
    if done.returncode:
        raise Unavailable(f"it does not compile (Debian: librabbitmq-dev): {done.stderr.strip().splitlines()[0]}")
    return target


@functools.cache
def installed() -> bool:
    """Install the compiler and the library with apt-get; return whether it succeeded.

    This is done only as root on Debian or a derivative.
    """
    apt = shutil.which("apt-get")
    if os.geteuid() != 0 or apt is None or not Path("/etc/debian_version").exists():
        return False
    print("installing librabbitmq-dev, for the comparison with rabbitmq-c", file=sys.stderr)
    packages = ["librabbitmq-dev", *([] if shutil.which("cc") else ["gcc", "libc6-dev"])]
    run([apt, "update", "-q"], deadline=INSTALL_DEADLINE)  # if this fails, the existing package lists may be enough
    done = run([apt, "install", "-q", "-y", "--no-install-recommends", *packages], deadline=INSTALL_DEADLINE)
    return done.returncode == 0


def run(command: list[str], *, deadline: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )


CONTENDERS = [
    Contender(
        name="rabbitmq-c",
        label="rabbitmq-c, window (C)",
        role=Role.PUBLISHER,
        program=publisher,
        reference="rabbitmq-c",
        curve=True,
    ),
    Contender(
        name="rabbitmq-c-consumer",
        label="rabbitmq-c, acks every 100 (C)",
        role=Role.CONSUMER,
        program=consumer,
        reference="rabbitmq-c",
    ),
]
