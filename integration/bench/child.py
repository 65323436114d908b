"""The process of one contender: a common command line, and a line of JSON output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields

from integration.bench.contender import Contender, Job, Meter, Sample

__all__ = ["main", "measure_publishing"]


def main(contenders: Sequence[Contender], arguments: Sequence[str] | None = None) -> None:
    """Run the contender that the command line names, and print its sample."""
    runs = {contender.name: contender.run for contender in contenders if contender.run is not None}
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=sorted(runs))
    for field in fields(Job):
        required = field.default is MISSING
        kind = str if field.name in {"url", "queue"} else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=required, default=field.default)
    options = vars(parser.parse_args(arguments))
    sample = runs[options.pop("contender")](Job(**options))
    json.dump(asdict(sample), sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


def measure_publishing(publish: Callable[[int], object], job: Job) -> Sample:
    """Warm up with ``publish(count)``, and measure it.

    ``publish`` returns when `count` messages are confirmed.
    """
    if job.warmup:
        publish(job.warmup)
    meter = Meter()
    meter.start()
    publish(job.messages)
    return meter.stop(job.messages)
