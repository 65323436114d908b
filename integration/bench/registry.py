"""Finds the contenders in the modules of `integration.bench.contenders`.

Modules that cannot be imported here are reported as missing.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import dataclass, field

from integration.bench import contenders
from integration.bench.contender import Bar, Contender, Job, Role, Unavailable

__all__ = ["Entry", "Missing", "Registry", "discover"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender and how to start its process."""

    contender: Contender
    prefix: tuple[str, ...]

    def command(self, job: Job) -> list[str]:
        return [*self.prefix, *job.arguments()]


@dataclass(frozen=True, slots=True)
class Missing:
    """A contender that cannot run here, or a module that cannot be imported (no role)."""

    name: str
    label: str
    role: Role | None
    reason: str


@dataclass(slots=True)
class Registry:
    """All contenders.

    Attributes:
        entries: The contenders that can run, by name, in the order of their modules.
        bars: The bars of all modules.
        missing: The contenders that cannot run, and why.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


def discover() -> Registry:
    """Import all contenders, and build those that are separate programs."""
    registry = Registry()
    for module_name in sorted(module.name for module in pkgutil.iter_modules(contenders.__path__)):
        path = f"{contenders.__name__}.{module_name}"
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            registry.missing.append(Missing(module_name, path, None, str(error)))
            continue
        registry.bars.extend(getattr(module, "BARS", ()))
        for contender in module.CONTENDERS:
            prefix: tuple[str, ...] = (sys.executable, "-m", path, contender.name)
            if contender.program is not None:
                try:
                    prefix = tuple(contender.program())
                except Unavailable as reason:
                    registry.missing.append(Missing(contender.name, contender.label, contender.role, str(reason)))
                    continue
            if contender.name in registry.entries:
                raise ValueError(f"two contenders are called {contender.name}")
            registry.entries[contender.name] = Entry(contender, prefix)
    return registry
