"""A folder for what a rank writes for a moment: it goes with the launch, also if the rank is stopped meanwhile."""

_folder: str | None = None


def scratch_folder() -> str | None:
    """Return the private folder of this rank's launch; None, for the system's own, in every other process."""
    return _folder


def use_as_scratch(folder: str) -> None:
    """Let `scratch_folder` return this folder from now on."""
    global _folder
    _folder = folder
