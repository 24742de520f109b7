"""Say in one line how far a lock file is behind a newer one: `python .ci/lock_age.py requirements.lock newest.lock`."""

import re
import sys
from collections import defaultdict
from pathlib import Path

PINNED = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def versions(lock: str) -> dict[str, list[str]]:
    """Return the versions of each package; a lock may pin one per Python."""
    found = defaultdict(list)
    for name, version in PINNED.findall(lock):
        found[name].append(version)
    return dict(found)


def difference(lock: str, newest: str) -> str:
    ours, theirs = versions(lock), versions(newest)
    changed = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if not changed:
        return "requirements.lock holds what the registry serves"

    def told(found: dict[str, list[str]], name: str) -> str:
        return " and ".join(found.get(name, ["none"]))

    steps = ", ".join(f"{name} {told(ours, name)} -> {told(theirs, name)}" for name in changed)
    return (
        f"requirements.lock is behind the registry in {len(changed)} of {len(ours)} packages (`make relock`): {steps}"
    )


if __name__ == "__main__":
    print(difference(*(Path(name).read_text() for name in sys.argv[1:])))
