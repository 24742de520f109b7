"""The flags of the command line, one for each setting of `TrainConfig`. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import get_args

from fsdp_helpers.config import TrainConfig

VALUE_NAMES = {int: "N", float: "X", str: "DIR", Path: "FILE", bool: ""}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of the command line."""

    setting: str
    kind: type  # of the value; bool for a switch, which takes none
    choices: tuple[str, ...] | None = None
    default: object = None
    placeholder: str | None = None
    meaning: str

    @property
    def name(self) -> str:
        """Return the flag's name; a switch that is on by default gets a flag that turns it off."""
        return ("--no-" if self.default is True else "--") + self.setting.replace("_", "-")

    @property
    def value(self) -> str:
        """Return the placeholder of the value in the help text; nothing for a switch."""
        return f"{{{','.join(self.choices)}}}" if self.choices else self.placeholder or VALUE_NAMES[self.kind]


def flags() -> Iterator[Flag]:
    """Yield one flag per setting, in the order of the settings."""
    for setting in fields(TrainConfig):
        (kind,) = [one for one in get_args(setting.type) or (setting.type,) if one is not NoneType]
        yield Flag(
            setting=setting.name,
            kind=kind,
            choices=setting.metadata["choices"],
            default=setting.default,
            placeholder=setting.metadata["placeholder"],
            meaning=setting.metadata["meaning"],
        )
