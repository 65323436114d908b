"""What the integration tests need beyond this repository: images and programs, made where they are missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

LINES = ("newest", "4.0")
_SETUP = Path(__file__).parent.parent / "setup.sh"


def broker_image(line: str) -> str:
    """The image of one of `LINES`, which may take minutes to build.

    Raises:
        RuntimeError: it cannot be had on this machine; the message says what to do.
    """
    set_up("image", line)
    return f"reliable-mq/rabbitmq:{line}"


def set_up(*part: str) -> None:
    """Have ``setup.sh`` see to it that a part exists; what is missing takes minutes to build or to install.

    Args:
        part: arguments of ``setup.sh``, such as ``"databases"``.

    Raises:
        RuntimeError: it cannot be had on this machine; the message says what to do.
    """
    done = subprocess.run([_SETUP, *part], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"setup.sh {' '.join(part)}:\n{done.stderr}")
