"""Check the Python environment: the versions in it, and whether Jupyter finds it."""

import importlib
import importlib.metadata as metadata
import importlib.util
import platform
import re
import sys
from pathlib import Path
from typing import Any

from fsdp_helpers.cli.doctor.rows import Outcome, Unfit, note

OLDEST_PYTHON = (3, 11)
LOCK = Path(__file__).resolve().parents[3] / "requirements.lock"
OURS = "fsdp-helpers"
LOADED = ("torch", "torchvision")  # their compiled parts have to match each other
KERNEL = "python3"
JUPYTER = ("jupyterlab", "ipykernel")
WITH_NOTEBOOKS = "`pip install '.[notebooks]'`"
PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;]+)(?P<marker> *;.*)?$", re.MULTILINE)
INSTALL = "install again with `make lab`, or `pip install -r requirements.lock` and `pip install --no-deps -e .`"


def python_is_new_enough() -> Outcome:
    """Compare this interpreter's version with the oldest supported version."""
    version, oldest = platform.python_version(), ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info < OLDEST_PYTHON:
        return Outcome(False, f"{version} is older than {oldest}; make a new environment: `make lab PYTHON=python3.12`")
    return Outcome(True, version)


def versions_fit() -> Outcome:
    """Check that torch and torchvision load, and that their requirements and this package's are installed."""
    problems = [problem for name in (OURS, *LOADED) for problem in unmet(name)]
    if problems:
        return Outcome(False, f"{'; '.join(problems)}; {INSTALL}")
    for name in LOADED:
        try:
            importlib.import_module(name)
        except Exception as error:
            return Outcome(False, f"{name} can't be loaded ({type(error).__name__}: {error}); {INSTALL}")
    return Outcome(True, ", ".join(f"{name} {metadata.version(name)}" for name in LOADED))


def unmet(name: str) -> list[str]:
    """Return a sentence for each requirement of `name` that this environment doesn't meet."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return [] if name == OURS else [f"{name} isn't installed"]  # ours may be used from its folder
    wanted = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [problem for requirement in wanted if (problem := why_unmet(name, requirement))]


def why_unmet(name: str, requirement: Any) -> str:
    """Return why a requirement of `name` isn't met, or ""."""
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{name} needs {requirement.name}, which isn't installed"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{name} needs {requirement.name}{requirement.specifier}, but {found} is installed"


def versions_as_locked() -> Outcome:
    """Count the packages whose versions differ from the tested versions, which is allowed."""
    if not LOCK.is_file():
        raise Unfit("there's no requirements.lock next to the package, so there's nothing to compare with")
    locked = locked_versions(LOCK.read_text())
    installed = {name: version_or_none(name) for name in locked}
    other = [
        f"{name} {installed[name]}, not {locked[name]}" for name in locked if differs(installed[name], locked[name])
    ]
    if not other:
        return Outcome(True, f"the versions in requirements.lock, {len(locked)} packages")
    return note(
        f"{len(other)} versions differ from the tested ones, so results may differ in the last digits: {other[0]}, ..."
    )


def locked_versions(text: str) -> dict[str, str]:
    """Return a dict from package name to version, as the lock file lists them for this machine."""
    from packaging.markers import Marker

    found = {}
    for pin in PINNED.finditer(text):
        marker = (pin["marker"] or "").lstrip(" ;")
        if not marker or Marker(marker).evaluate():
            found[pin["name"]] = pin["version"]
    return found


def version_or_none(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def differs(installed: str | None, locked: str) -> bool:
    """Return True if the versions differ, ignoring suffixes such as +cpu; `versions_fit` reports missing packages."""
    return installed is not None and installed.partition("+")[0] != locked.partition("+")[0]


def jupyter_finds_this_environment() -> Outcome:
    """Find out from Jupyter which interpreter the notebooks' kernel runs."""
    missing = [name for name in JUPYTER if importlib.util.find_spec(name) is None]
    if missing == [*JUPYTER]:  # for example after `pip install .`
        return note(f"not installed: commands and scripts work, notebooks don't; {WITH_NOTEBOOKS} installs it")
    if missing:
        return Outcome(False, f"{' and '.join(missing)} can't be imported; {INSTALL}")
    from jupyter_client.kernelspec import KernelSpecManager

    spec = KernelSpecManager().get_kernel_spec(KERNEL)
    if starts_this_python(spec.argv[0]):
        return Outcome(True, f"kernel {KERNEL} starts this Python")
    remedy = f"run `{sys.executable} -m ipykernel install --sys-prefix`, and remove the other kernel"
    return Outcome(False, f"kernel {KERNEL} starts {spec.argv[0]}, not {sys.executable}; {remedy}: {spec.resource_dir}")


def starts_this_python(command: str) -> bool:
    """Return True if a kernel's command starts this Python, by bare name or by a path in this environment."""
    path = Path(command)
    return not path.is_absolute() or path.parent == Path(sys.executable).parent
