"""The command ``reliable-mq demo``: handlers and broker fail; no order is lost."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from reliable_mq.cli.terminal import PASSWORD_HELP, hide_logs, with_password

__all__ = ["demo"]

_KILLS: Final = 2


def demo(
    *,
    url: Annotated[
        str, typer.Option(metavar="URL", help=f"The broker. {PASSWORD_HELP}", callback=with_password)
    ] = "amqp://guest:guest@localhost/",
    messages: Annotated[int, typer.Option(min=1, help="The number of orders to publish.")] = 30_000,
    rate: Annotated[float, typer.Option(min=0.0, help="Orders per second; 0 for no limit.")] = 5000.0,
    kill_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="The command that kills the broker, such as 'docker kill rabbit'. Default: no outages.",
        ),
    ] = None,
    restart_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="The command that starts it again, such as 'docker start rabbit'."),
    ] = None,
    kills: Annotated[int | None, typer.Option(min=1, help="How often to kill the broker. Default: 2.")] = None,
) -> None:
    """Publish and handle orders while the broker dies, and show that none is lost.

    It declares its own queues in the virtual host, and deletes them at the end. The exit status is 1 if the audit finds
    a lost order.
    """
    if (kill_command is None) != (restart_command is None):
        raise typer.BadParameter("--kill-command and --restart-command go together")
    if kills is not None and kill_command is None:
        raise typer.BadParameter("--kills needs --kill-command: without it, the broker is not killed")
    from reliable_mq.cli.demo.display import run
    from reliable_mq.cli.demo.scenario import Outages, Shop
    from reliable_mq.url import parse_url

    hide_logs()
    settings = parse_url(url)
    shop = Shop(url, settings, orders=messages, rate=rate)
    outages = Outages(kill_command, restart_command, times=_KILLS if kills is None else kills)
    raise typer.Exit(run(shop, outages, ", ".join(map(str, settings.endpoints))))
