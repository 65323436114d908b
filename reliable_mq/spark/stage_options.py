"""The options of staged mode: those of the stage, and those of stream mode.

Invariant: as in `reliable_mq.spark.options`, a value that is not understood is an error that names the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import SHORT_STRING_BYTES
from reliable_mq.spark.options import STREAM_MODE_OPTIONS, StreamOptions, check_known, read_options
from reliable_mq.stage import MissingId, StageOptions
from reliable_mq.stage.options import DEFAULT_RETENTION

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STAGE_OPTIONS", "StagedOptions", "is_staged", "staged_options"]

#: The options that are for staged mode alone.
STAGE_OPTIONS: Final = (
    "stage",
    "stageBy",
    "stagePartitions",
    "stageKey",
    "stageRetention",
    "stageMaxBytes",
    "stageMissingId",
)
#: What the user calls the options of the relay.
_NAMES: Final = {
    "partitions": "stagePartitions",
    "key": "stageKey",
    "retention": "stageRetention",
    "max_bytes": "stageMaxBytes",
    "missing_id": "stageMissingId",
}
_KNOWN: Final = (*STAGE_OPTIONS, "queue", *(name for name in STREAM_MODE_OPTIONS if name != "stream"))
_BEGINNINGS: Final = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp")
_BY: Final = ("query", "none")


@dataclass(frozen=True, slots=True)
class StagedOptions:
    """Options of staged mode.

    Attributes:
        relay: of the relay in the reader's process; None where another one fills the stage, or none.
        stream: for reading the stage.
    """

    relay: StageOptions | None
    stream: StreamOptions


def is_staged(given: Mapping[str, str]) -> bool:
    """Whether the options of a source ask for staged mode."""
    return any(name.lower() == "stage" for name in given)


def staged_options(given: Mapping[str, str], *, streaming: bool) -> StagedOptions:
    """Check the options of a source in staged mode.

    Raises:
        ConfigurationError: one is wrong, unknown, or does not go with another; the text names it.
    """
    lower = {name.lower(): value for name, value in given.items()}
    known = {name.lower(): name for name in STAGE_OPTIONS}
    stage, queue = lower["stage"].strip(), lower.get("queue", "").strip()
    if not streaming:
        _refuse(f"stage is for spark.readStream: spark.read reads the stage with the option stream={stage!r}")
    if "stream" in lower:
        _refuse("stream and stage are both given: with stage, the option queue says where messages come from")
    if "streamfilter" in lower:
        _refuse("streamFilter is for streams: a stage has the headers of messages in one of ours, which no filter sees")
    check_known(given, _KNOWN)
    if not stage or "," in stage or len(stage.encode()) > SHORT_STRING_BYTES:
        _refuse(f"stage must name one stream, in at most {SHORT_STRING_BYTES} bytes, not {stage[:40]!r}")
    if not queue or "," in queue:
        _refuse("with stage, the option queue must name one queue; give each queue a stage and a query of its own")
    by = lower.get("stageby", "query")
    if by not in _BY:
        _refuse(f"stageBy must be {' or '.join(_BY)}, not {by!r}")
    rest = {name: value for name, value in lower.items() if name not in known and name != "queue"}
    if not any(name in rest for name in _BEGINNINGS):
        rest["startingoffsets"] = "earliest"  # what was moved before the query began is its own
    stream = read_options({**rest, "stream": stage}, streaming=True)
    if not isinstance(stream, StreamOptions):
        raise TypeError(f"options of stream mode are {stream!r}")
    if by == "none":
        for name in set(lower) & set(known) - {"stage", "stageby"}:
            _refuse(f"{known[name]} is for the relay of the query, and stageBy is none")
        return StagedOptions(None, stream)
    retention = lower.get("stageretention", DEFAULT_RETENTION)
    relay = StageOptions(
        url=stream.url,
        queue=queue,
        stage=stage,
        partitions=_number(lower, "stagePartitions"),
        key=lower.get("stagekey", "message_id"),
        retention=None if retention == "0" else retention,
        max_bytes=_number(lower, "stageMaxBytes"),
        missing_id=_one_of(lower, "stageMissingId", MissingId, MissingId.REFUSE),
        names=_NAMES,
    )
    return StagedOptions(relay, stream)


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        _refuse(f"{name} must be a whole number of at least 1, not {text!r}")
    return int(text)


def _one_of(given: Mapping[str, str], name: str, kind: Callable[[str], MissingId], default: MissingId) -> MissingId:
    text = given.get(name.lower())
    if text is None:
        return default
    try:
        return kind(text)
    except ValueError:
        _refuse(f"{name} must be {' or '.join(each.value for each in MissingId)}, not {text!r}")


def _refuse(why: str) -> NoReturn:
    raise ConfigurationError(why)
