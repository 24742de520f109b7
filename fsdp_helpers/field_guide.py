"""The field guide: each failure is one file that you can read, copy and run. This module doesn't import torch.

A script is broken: deleting its lines marked `# broken`, and uncommenting those behind `# fixed: `, fixes it. Its
docstring is the failure's card, in Markdown. A failure that we don't run is only that card, in a .md file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SYMPTOMS = {
    "hang": "it hangs",
    "crash": "it crashes",
    "memory": "it runs out of memory",
    "wrong": "it trains, but wrongly",
    "slow": "it's slow",
    "save": "it saves, but doesn't resume correctly",
}
INSTALLED, IN_CHECKOUT = Path(__file__).with_name("failures"), Path(__file__).parents[1] / "notebooks" / "failures"
FOLDER = INSTALLED if INSTALLED.is_dir() else IN_CHECKOUT
BROKEN, FIXED = re.compile(r"  # broken(: .*)?$"), re.compile(r"^( *)# fixed: ")
SCRIPT = re.compile(r'r?"""(.*?)"""\n(.*)', re.DOTALL)
ROW = re.compile(r"^- (.*(?:\n  .*)*)", re.MULTILINE)
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`) ?(.+?) ?(?<!`)\1(?!`)")


@dataclass(frozen=True)
class Card:
    """A failure: its name begins with the symptom; its text has a title and parts with bold headings."""

    name: str
    text: str
    code: str = ""  # of the broken script; "" if it isn't run

    @property
    def file(self) -> str:
        return f"{self.name}.py" if self.code else f"{self.name}.md"

    @property
    def link(self) -> str:
        return f"[{self.name}](failures/{self.file})"  # in a notebook

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def needs(self) -> str:
        """Return the first PyTorch version in which the script behaves as the card says, such as "2.13", or ""."""
        found = re.search(r"^Needs: torch >= (\d+\.\d+)$", self.text, re.MULTILINE)
        return found[1] if found else ""

    def part(self, heading: str) -> str:
        """Return what follows a bold heading, such as "Why", up to the next one, or up to "Not run here"."""
        text = self.text.partition(f"**{heading}")[2].partition("**")[2]
        return re.split(r"\n\n(?:\*\*|Not run here)", text)[0].strip("\n")

    def rows(self) -> Iterator[str]:
        """Yield the rows under "Also seen as", each on one line."""
        yield from (" ".join(row.split()) for row in ROW.findall(self.part("Also seen as")))

    def messages(self) -> list[str]:
        """Return what programs print: the code spans of the rows that begin with one."""
        return [found[2] for row in self.rows() if row[0] == "`" for found in CODE_SPAN.finditer(row)]

    def script(self, *, broken: bool = False, fixed: bool = False) -> str:
        """Return the script with or without its broken lines, and with or without those of its fix."""
        kept = [line for line in self.code.splitlines() if broken or not BROKEN.search(line)]
        return "\n".join(FIXED.sub(r"\1", line) if fixed else line for line in kept) + "\n"


@cache
def cards(folder: Path = FOLDER) -> dict[str, Card]:
    """Return all cards by name, in the order of the symptoms."""
    found = [read(path) for path in sorted(folder.iterdir()) if path.suffix in (".py", ".md") and "-" in path.stem]
    return {card.name: card for symptom in SYMPTOMS for card in found if card.name.startswith(f"{symptom}-")}


def read(path: Path) -> Card:
    """Read a card. Raises ValueError for a script that doesn't begin with its docstring."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        return Card(path.stem, source)
    if not (parts := SCRIPT.fullmatch(source)):
        raise ValueError(f"{path.name}: a script of the field guide begins with its card, between two lines of quotes")
    return Card(path.stem, *parts.groups())


def index() -> str:
    """Return the folder's README: its first part as it is, and then all failures by symptom."""
    parts = [(FOLDER / "README.md").read_text("utf-8").partition("\n## ")[0]]
    for symptom, words in SYMPTOMS.items():
        found = [card for card in cards().values() if card.name.startswith(f"{symptom}-")]
        parts.append(f"## {words[0].upper()}{words[1:]}\n")
        parts += [f"- [{card.title}]({card.file})" + ("" if card.code else ", not run here") for card in found]
        parts[-1] += "\n"
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(index(), "utf-8")
