"""The account, closed: what became of every order, and whether it adds up."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from reliable_mq.cli.orders.shop import Progress
from reliable_mq.testing.account import Balance

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A closed account.

    Attributes:
        balance: what the account comes to.
        progress: the counts at the end.
        outages: how often the broker was killed.
        seconds: that it took.
    """

    balance: Balance
    progress: Progress
    outages: int
    seconds: float

    @property
    def faults(self) -> list[str]:
        """Why it does not add up; empty where it does."""
        balance = self.balance
        faults = []
        try:
            balance.check(effects_once=True)
        except AssertionError as error:
            faults.append(str(error))
        if balance.confirmed + len(balance.recovered | balance.refuted) != balance.handled + balance.dead_lettered:
            faults.append("confirmed is not handled + dead-lettered")
        if balance.left:
            faults.append(f"{balance.left:,} orders are left in the queue")
        return faults

    @property
    def equation(self) -> str:
        """The account in one line."""
        balance = self.balance
        arrived = len(balance.recovered | balance.refuted)
        more = f" + {arrived:,} unconfirmed, yet arrived" if arrived else ""
        sign = "=" if balance.confirmed + arrived == balance.handled + balance.dead_lettered else "≠"
        return (
            f"confirmed {balance.confirmed:,}{more} {sign} handled {balance.handled:,} "
            f"+ dead-lettered {balance.dead_lettered:,}, lost {len(balance.lost):,}"
        )

    @property
    def so_far(self) -> str:
        """An account that was closed early, in one line."""
        balance = self.balance
        return (
            f"of {balance.confirmed:,} confirmed {balance.handled:,} were handled, {balance.dead_lettered:,} "
            f"dead-lettered, {balance.left:,} left in the queue, lost {len(balance.lost):,}"
        )

    def __rich__(self) -> Group:
        balance, progress, faults = self.balance, self.progress, self.faults
        table = Table.grid(padding=(0, 3))
        table.add_column()
        table.add_column(justify="right")
        table.add_column(style="dim")
        again = f"of them {progress.republished:,} again, since nobody could say whether they had arrived"
        once = "each had its effect exactly once" if not balance.repeated_effects else "some had it more than once"
        rows = [
            ("published", balance.attempted, again if progress.republished else ""),
            ("confirmed", balance.confirmed, ""),
            ("handled", balance.handled, once),
            ("dead-lettered", balance.dead_lettered, "the orders that no handler can process, after three attempts"),
            ("lost", len(balance.lost), ""),
        ]
        if balance.failed:
            rows.insert(2, ("failed", balance.failed, "reported as such by the publisher"))
        for name, count, remark in rows:
            table.add_row(name, Text(f"{count:,}", style="bold"), remark)
        killed = {0: "", 1: "The broker was killed once. "}.get(
            self.outages, f"The broker was killed {self.outages} times. "
        )
        summary = (
            f"{killed}{progress.retried:,} failed attempts were tried again, "
            f"{progress.duplicates:,} duplicates were set aside, in {self.seconds:.0f} s."
        )
        mark, style = ("✘", "bold red") if faults else ("✔", "bold green")
        result = Text(f"{mark} {self.equation}", style=style)
        return Group("", table, "", summary, *(Text(fault, style="red") for fault in faults), result)
