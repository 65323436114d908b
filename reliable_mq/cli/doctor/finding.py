"""The findings of the doctor, shown as a table or as JSON.

The table has equal findings of several queues once, because a virtual host of a thousand queues often has the same
finding for each. JSON has every finding of every queue.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from reliable_mq.cli.terminal import escaped, json_text, output, plain_table

if TYPE_CHECKING:
    from reliable_mq.settings import ConnectionSettings


class Status(enum.Enum):
    NOTE = "note"  # about something that no client can read
    OK = "ok"
    UNCHECKED = "not checked"
    WARNING = "warning"
    PROBLEM = "problem"


_MARKS: Final = {
    Status.NOTE: ("i", "cyan"),
    Status.OK: ("✔", "green"),
    Status.UNCHECKED: ("?", "cyan"),
    Status.WARNING: ("!", "yellow"),
    Status.PROBLEM: ("✘", "red"),
}
_QUEUE: Final = "queue "
_NAMED: Final = 3  # queues that have an equal finding; the others are counted


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        status: The severity of the finding.
        subject: The checked object: a host, ``"broker"``, ``"queue 'orders'"``.
        check: The property that was checked, in one or two words.
        text: The state of the property and its consequence.
        fix: The remedy. Empty if none is needed.
    """

    status: Status
    subject: str
    check: str
    text: str
    fix: str = ""


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status, which is at least OK."""
    return max((Status.OK, *(finding.status for finding in findings)), key=list(Status).index)


def write_json(settings: ConnectionSettings, findings: Sequence[Finding]) -> None:
    report = {
        "url": str(settings),
        "status": worst(findings).value,
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in findings],
    }
    print(json_text(report, indent=2))


def show(settings: ConnectionSettings, findings: Sequence[Finding]) -> None:
    table = plain_table()
    table.add_column("", overflow="fold")  # names of queues often differ at their ends only
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("finding", overflow="fold", ratio=1)
    for subjects, group in _sections(findings).items():
        table.add_section()
        for number, finding in enumerate(group):
            mark, style = _MARKS[finding.status]
            text = Text(escaped(finding.text))
            if finding.fix:
                text.append(f"\n→ {escaped(finding.fix)}", style="italic")
            title = Text(_title(subjects) if number == 0 else "", style="bold")
            table.add_row(title, Text(mark, style=style), Text(escaped(finding.check)), text)
    output.print(Text(escaped(settings), style="bold"))
    output.print(table)
    counts = Counter(finding.status for finding in findings)
    output.print(
        Text("  ").join(
            Text(f"{_MARKS[status][0]} {_counted(counts[status], status)}", style=_MARKS[status][1])
            for status in list(Status)[1:]  # without the notes
        )
    )


def _sections(findings: Iterable[Finding]) -> Mapping[tuple[str, ...], Sequence[Finding]]:
    """Return findings by their subjects. Equal findings of several queues are one."""
    subjects: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        equal = replace(finding, subject=_QUEUE) if finding.subject.startswith(_QUEUE) else finding
        subjects.setdefault(equal, {})[finding.subject] = None
    sections: dict[tuple[str, ...], list[Finding]] = {}
    for finding, found in subjects.items():
        sections.setdefault(tuple(found), []).append(finding)
    return sections


def _title(subjects: Sequence[str]) -> str:
    if len(subjects) == 1:
        return escaped(subjects[0])
    lines = [f"{len(subjects):,} queues", *(escaped(each.removeprefix(_QUEUE)) for each in subjects[:_NAMED])]
    more = len(subjects) - _NAMED
    return "\n".join([*lines, f"and {more:,} more (--json)"] if more > 0 else lines)


def _counted(count: int, status: Status) -> str:
    plural = "s" if status in (Status.WARNING, Status.PROBLEM) and count != 1 else ""
    return f"{count:,} {status.value}{plural}"
