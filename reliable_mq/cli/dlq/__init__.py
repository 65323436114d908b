"""``reliable-mq dlq``: `reliable_mq.deadletters` for the shell."""

from __future__ import annotations

import typer

from reliable_mq.cli.dlq.commands import export, import_, list_, purge, replay, show, stats

__all__ = ["dlq"]

dlq = typer.Typer(
    name="dlq",
    help="Browse, count, replay, purge, export and import dead letters.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
dlq.command("list")(list_)
dlq.command()(show)
dlq.command()(stats)
dlq.command()(replay)
dlq.command()(purge)
dlq.command()(export)
dlq.command("import")(import_)
