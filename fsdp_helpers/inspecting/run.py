"""Running a script under watch, as `python SCRIPT ARGUMENTS` would, to its end or until it has been seen enough."""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_helpers.inspecting import batches, files, gradients, parameters, units
from fsdp_helpers.inspecting.watch import Enough, Watch

PROBES = [probe for module in (parameters, batches, gradients, units, files) for probe in module.PROBES]


class Exit(BaseException):
    """Stands for `os._exit`, which would end this process before its report."""


def watch_script(watch: Watch, path: str, arguments: Sequence[str], code: str | None = None) -> int:
    """Run the script with all probes; return its exit status, and note how it ended."""
    for probe in PROBES:
        probe(watch)
    pid, leave = os.getpid(), os._exit

    def end(status: int) -> None:
        if os.getpid() != pid:  # a loader's worker
            leave(status)
        raise Exit(status)

    os._exit, sys.argv = end, [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        exec(compile(code or Path(path).read_bytes(), path, "exec"), namespace(path))
    except Enough:
        return 0
    except (SystemExit, Exit) as error:
        status = error.args[0] if error.args else 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
        return status if isinstance(status, int) else int(status is not None)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        print(
            "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]), end="", file=sys.stderr
        )
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr, flush=True)
        watch.record.end = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        return 1
    finally:
        watch.tell("end")
        watch.looking, os._exit = True, leave  # what follows is no longer the script's
    return 0


def namespace(path: str) -> dict[str, Any]:
    """Make `__main__` the script, where it looks for its own classes and functions, and pickle, too."""
    main = sys.modules["__main__"] = type(sys)("__main__")
    vars(main).update(__file__=path, __builtins__=__builtins__)
    return vars(main)
