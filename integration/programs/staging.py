"""A relay into a stage, in a process that a test kills.

Arguments: URL, queue, stage and messages per entry. Prints a line once the relay is active.
"""

from __future__ import annotations

import sys

from reliable_mq.stage import StageOptions, StageRelay

if __name__ == "__main__":
    url, queue, stage, most = sys.argv[1:5]
    relay = StageRelay(StageOptions(url=url, queue=queue, stage=stage, messages_per_entry=int(most), new_stage_grace=0))
    relay.start()
    while not relay.wait_active(1.0):
        pass
    print("active", flush=True)
    relay.wait_ended()
