"""Run failures again and save their output in notebooks/reference/failures.json, for notebook 11's saved cards.

python -m fsdp_helpers.teaching.page.keep_cards               all of them (takes a quarter of an hour)
python -m fsdp_helpers.teaching.page.keep_cards NAME ...      some of them
python -m fsdp_helpers.teaching.page.keep_cards --tools       py-spy and the debug server, which need extra packages
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.failures import gallery, plain, tools
from fsdp_helpers.teaching.failures.entry import Failure
from fsdp_helpers.teaching.page.cards import stacks_of_page

KEPT = Path(__file__).parents[3] / "notebooks/reference/failures.json"


def keep(failure: Failure, kept: dict) -> None:
    """Add a failure's broken and fixed runs, the broken one's time and, if that ends in an error, torchrun's output."""
    start_s = time.monotonic()
    broken = gallery.run_broken(failure)
    kept["seconds"][failure.name] = round(time.monotonic() - start_s, 1)
    kept[failure.name] = {"broken": asdict(broken), "fixed": asdict(gallery.run_fixed(failure))}
    if failure.says or failure.name in plain.SCRIPTS:
        kept["torchrun"][failure.name] = plain.run_plainly(failure.name)


def keep_tools(kept: dict) -> None:
    """Add the output of the tools that need extra packages."""
    two_ranks = {"world_size": 2, "device": "cpu", "progress": False, "timeout_s": gallery.LIMIT_S}
    dump = launch(tools.dump_with_py_spy, **two_ranks)[1]
    kept["py-spy"] = dump[dump.index("Thread ") :].splitlines()[:4]  # down to the rank function
    kept["debug server"] = stacks_of_page(launch(tools.read_debug_server, **two_ranks)[1])


def main(arguments: Sequence[str], path: Path = KEPT) -> None:
    """Run the failures that the arguments name, and write the file after each."""
    kept = json.loads(path.read_text())
    if "--tools" in arguments:
        keep_tools(kept)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        return
    for failure in map(gallery.find, arguments) if arguments else gallery.RUN:
        keep(failure, kept)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{failure.name}: {kept['seconds'][failure.name]} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
