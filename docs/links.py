"""Print the links that open this project elsewhere, made from its address in pyproject.toml: `make links`.

`make links HUB=https://hub.example.org` prints the link for a class on that JupyterHub, too.
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode, urlsplit

PROJECT = Path(__file__).resolve().parents[1]
NOTEBOOK = "blob/main/docs/colab.ipynb"
MISSING = "pyproject.toml has no address yet: set Repository in [project.urls] to this repository's address"


def address(project: Path = PROJECT) -> str:
    """Return the repository's address. Raises ValueError if it isn't set."""
    urls = tomllib.loads((project / "pyproject.toml").read_text())["project"].get("urls", {})
    if not (found := urls.get("Repository", "")):
        raise ValueError(MISSING)
    return found.rstrip("/").removesuffix(".git")


def links(repository: str, hub: str = "") -> dict[str, str]:
    """Return what opens the project, by where it does. Colab and codespaces open repositories on GitHub only."""
    name = repository.rpartition("/")[2]
    found = {"clone": f"git clone {repository}"}
    if urlsplit(repository).hostname == "github.com":
        path = urlsplit(repository).path
        found["Colab"] = f"https://colab.research.google.com/github{path}/{NOTEBOOK}"
        found["Codespaces"] = f"https://codespaces.new{path}"
    found["Kaggle"] = f"https://www.kaggle.com/kernels/welcome?{urlencode({'src': f'{repository}/{NOTEBOOK}'})}"
    if hub:
        first = f"lab/tree/{name}/notebooks/00_start_here.ipynb"
        settings = {"repo": repository, "branch": "main", "urlpath": first}
        found["JupyterHub"] = f"{hub.rstrip('/')}/hub/user-redirect/git-pull?{urlencode(settings)}"
    return found


def main(arguments: Sequence[str]) -> int:
    """Print one link per line; return 2 if there's no address."""
    try:
        found = links(address(), *arguments)
    except ValueError as error:
        print(f"links: {error}", file=sys.stderr)
        return 2
    for where, link in found.items():
        print(f"{where}: {link}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
