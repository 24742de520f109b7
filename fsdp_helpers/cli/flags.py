"""The command line's flags, made from the dataclasses that define the settings. No torch import."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from fsdp_helpers.config import TrainConfig

VALUE_NAMES = {int: "N", float: "X", str: "DIR", Path: "FILE", bool: ""}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A command-line flag."""

    setting: str
    kind: type  # the value's type; bool for a switch, which takes no value
    choices: tuple[str, ...] | None = None
    default: object = None
    meaning: str
    flag: str | None = None  # its name, if it differs from the setting's
    factor: float = 1  # the setting is the value times this, for example to turn GB into bytes

    @property
    def name(self) -> str:
        """Return the flag's name or, for a switch that's on by default, the name of the flag that turns it off."""
        return ("--no-" if self.default is True else "--") + (self.flag or self.setting.replace("_", "-"))

    @property
    def value(self) -> str:
        """Return the placeholder for the value in the help text; "" for a switch."""
        return f"{{{','.join(self.choices)}}}" if self.choices else VALUE_NAMES[self.kind]

    def argument(self) -> dict[str, Any]:
        """Return the keyword arguments for argparse; a switch that may be on, off or unset gets two names."""
        if self.kind is bool and self.default is None:
            return {
                "dest": self.setting,
                "action": argparse.BooleanOptionalAction,
                "default": None,
                "help": self.meaning,
            }
        if self.kind is bool:
            return {"dest": self.setting, "action": f"store_{not self.default}".lower(), "help": self.meaning}
        default = "" if self.default is None else " (default: %(default)s)"
        return {
            "dest": self.setting,
            "type": self.kind,
            "choices": self.choices,
            "metavar": None if self.choices else self.value,
            "default": self.default,
            "help": self.meaning.replace("%", "%%") + default,
        }

    def words(self, value: object) -> list[str]:
        """Return the command-line words that set this value, or none for the default."""
        if value == self.default or value is None:
            return []
        if self.kind is bool:
            return [self.name if value or self.default is True else self.name.replace("--", "--no-", 1)]
        return [self.name, f"{value / self.factor:.12g}" if self.kind is float else str(value)]


def flags(settings: type = TrainConfig) -> Iterator[Flag]:
    """Yield a flag for each documented field of a dataclass, in field order."""
    for one in fields(settings):
        if "meaning" in one.metadata:
            (kind,) = [kind for kind in get_args(one.type) or (one.type,) if kind is not NoneType]
            names = ("choices", "meaning", "flag", "factor")
            known = {name: one.metadata[name] for name in names}
            yield Flag(setting=one.name, kind=kind, default=one.default, **known)


def add_flags(parser: Any, rows: Iterable[Flag]) -> None:
    for row in rows:
        parser.add_argument(row.name, **row.argument())


def given_settings(options: Mapping[str, Any], rows: Iterable[Flag]) -> dict[str, Any]:
    """Return the settings given on the command line, each converted to the setting's unit."""
    found = {row.setting: (row, options[row.setting]) for row in rows}
    return {
        name: value * row.factor if row.kind is float else value
        for name, (row, value) in found.items()
        if value is not None
    }
