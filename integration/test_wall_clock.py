"""A publisher and a consumer while the wall clock jumps."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from integration.support.programs import environment, faketime

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.testing import FaultProxyFactory, VirtualHost


def test_f45_wall_clock_jumps_by_an_hour(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, tmp_path: Path, one_api: str
) -> None:
    """A jump of an hour either way affects no deadline, wait or heartbeat."""
    proxy = fault_proxy(vhost.url)
    offset_file = tmp_path / "offset"
    offset_file.write_text("+0")
    controls = {"hold": proxy.hold_confirms, "release": proxy.release_confirms, "cut": proxy.cut}
    with subprocess.Popen(
        [sys.executable, "-m", "integration.programs.jumping_clock", one_api, proxy.url, str(offset_file)],
        env=environment() | faketime(offset_file),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        while (line := program.stdout.readline().strip()) in controls:
            controls[line]()
            program.stdin.write("done\n")
            program.stdin.flush()
    assert (line, program.returncode) == ("end", 0)
    # The first connection of the publisher, one after each cut, the consumer's, and that of its publisher.
    assert proxy.connections == 5
