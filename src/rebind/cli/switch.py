"""Triton's boolean flags: ``--flag``, ``--flag=true|on|1``, ``--flag=false|off|0`` (spec 05 section 5)."""

from __future__ import annotations

import enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from rebind.config.validation import SWITCH_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator

METAVAR = "BOOL"


class Switch(enum.Enum):
    """The value of a boolean flag. A type of its own, since typer makes a flag without values of every ``bool``."""

    ON = True
    OFF = False

    def __str__(self) -> str:
        return "true" if self.value else "false"


def parse_switch(text: str | Switch) -> Switch:
    """What ``text`` stands for; also called by typer with the default."""
    if isinstance(text, Switch):
        return text
    try:
        return Switch(SWITCH_VALUES[text.lower()])
    except KeyError:
        raise typer.BadParameter(f"{text!r} is none of true, on, 1, false, off, 0") from None


def switch_option(*names: str, help: str, **settings: Any) -> Any:
    """The typer option of a parameter of type :class:`Switch`, in a command of class :class:`SwitchCommand`."""
    return typer.Option(*names, parser=parse_switch, metavar=METAVAR, help=help, **settings)


class SwitchCommand(TyperCommand):
    """A command whose boolean flags may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives the flags that stand alone the value ``true``, and goes on as usual."""
        flags = {name for parameter in self.params if parameter.metavar == METAVAR for name in parameter.opts}
        return super().parse_args(ctx, list(_with_values(args, flags)))


def _with_values(args: list[str], flags: set[str]) -> Iterator[str]:
    for argument, following in pairwise([*args, "-"]):
        alone = argument in flags and following.startswith("-")
        yield f"{argument}=true" if alone else argument
