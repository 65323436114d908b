"""Images and programs for the integration tests, built or installed if missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

LINES = ("newest", "4.0")
_SETUP = Path(__file__).parent.parent / "setup.sh"


def broker_image(line: str) -> str:
    """Return the image of one of `LINES`, which may take minutes to build.

    Raises:
        RuntimeError: If the image is not available on this machine. The message says what to do.
    """
    set_up("image", line)
    return f"reliable-mq/rabbitmq:{line}"


def set_up(*part: str) -> None:
    """Have ``setup.sh`` provide a part. Building or installing it may take minutes.

    Args:
        part: The arguments of ``setup.sh``, such as ``"databases"``.

    Raises:
        RuntimeError: If the part is not available on this machine. The message says what to do.
    """
    done = subprocess.run([_SETUP, *part], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"setup.sh {' '.join(part)}:\n{done.stderr}")
