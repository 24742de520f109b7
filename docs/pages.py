"""What Sphinx has to know of these pages.

JupyterLab's anchors, outputs that need a kernel, figures' descriptions, words of the glossary, failures, and the package
for the pages that run it in the browser.
"""

import difflib
import json
import re
import shutil
import zipfile
from base64 import b64decode
from hashlib import sha256
from pathlib import Path, PurePosixPath

import nbformat
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from fsdp_helpers.field_guide import SCRIPT, Card, cards

PROJECT = Path(__file__).parents[1]
PYODIDE = PROJECT / ".venv-docs" / "package"  # as npm unpacks it
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
FAILURES = "notebooks/failures/"
SCRIPT_LINK = re.compile(r"(href=\S*failures/[a-z0-9-]+)\.(?:py|md)\b")  # in what a cell shows
GLOSSARY = "notebooks/GLOSSARY"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)")  # to a folder, it leads nowhere on a site
DESCRIPTIONS: dict[str, str] = {}  # of all pictures so far, by the digests that name their files
CONTENTS = """
```{toctree}
:hidden:
:glob:

notebooks/[0-9]*
notebooks/GLOSSARY
notebooks/WORKSHOP
notebooks/failures/README
docs/*
COMMANDS
CONTRIBUTING
CHANGELOG
AGENTS
```
"""


def anchor_of(title: str) -> str:
    """Return the anchor that JupyterLab gives a heading; links between the notebooks use it."""
    return title.replace("`", "").replace(" ", "-")


def prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the contents to the first page; remove outputs that need a kernel, and those of unsolved exercises."""
    if name == app.config.root_doc:
        source[0] = LINK.sub(lambda link: link[1] if (app.srcdir / link[2]).is_dir() else link[0], source[0]) + CONTENTS
    elif name == f"{FAILURES}README":
        source[0] += all_messages()
    elif name.startswith(FAILURES) and not app.env.doc2path(name).suffix == ".py":
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif source[0].startswith("{"):
        notebook = json.loads(source[0])
        notebook["metadata"].pop("widgets", None)
        for cell in notebook["cells"]:
            if "exercise" in cell["metadata"].get("tags", []):
                cell["outputs"] = []
            elif "outputs" in cell:
                cell["outputs"] = [one for one in cell["outputs"] if not needs_a_kernel(one)]
                DESCRIPTIONS.update(map(described, filter(has_description, cell["outputs"])))
        source[0] = SCRIPT_LINK.sub(r"\1.html", json.dumps(notebook))


def needs_a_kernel(output: dict) -> bool:
    return "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def has_description(output: dict) -> bool:
    return "alt" in output.get("metadata", {}).get("image/png", {})


def described(output: dict) -> tuple[str, str]:
    """Return the stem of the file that myst-nb writes for a figure, and the figure's description."""
    picture = "".join(output["data"]["image/png"])
    return sha256(b64decode(picture)).hexdigest(), output["metadata"]["image/png"]["alt"]


def describe_pictures(app: Sphinx, page: nodes.document) -> None:
    """Give each figure its description, in place of its file's name."""
    for image in page.findall(nodes.image):
        image["alt"] = DESCRIPTIONS.get(PurePosixPath(image["uri"]).stem, image.get("alt", ""))


def all_messages() -> str:
    """Return what programs print when they fail, in one list, so that the browser's search finds it on the page."""
    rows = (f"- [{card.name}]({card.file}): {row}\n" for card in cards().values() for row in card.rows())
    return "\n## All that people see\n\n" + "".join(rows)


def read_script(source: str) -> nbformat.NotebookNode:
    """Return a script as a page: its docstring, its code and, for one of the field guide, what the fix changes."""
    about, code = SCRIPT.fullmatch(source.partition("\n")[2] if source.startswith("#!") else source).groups()
    text = f"{about if about.startswith('# ') else '# ' + about}\n\n## The script\n\n```python\n{source}```\n"
    card = Card("", about, code)
    broken, fixed = card.script(broken=True).splitlines(), card.script(fixed=True).splitlines()
    if changes := list(difflib.unified_diff(broken, fixed, lineterm="", n=2))[2:]:
        text += "\n## The fix\n\n```diff\n" + "\n".join(changes) + "\n```\n"
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)], metadata={"orphan": True})


def add_python(app: Sphinx, error: Exception | None) -> None:
    """Put Pyodide and the package beside the pages that run it."""
    if error or not PYODIDE.is_dir():
        return
    static = Path(app.outdir, "_static")
    (static / "pyodide").mkdir(exist_ok=True)
    for name in PYODIDE_FILES:
        shutil.copy(PYODIDE / name, static / "pyodide")
    with zipfile.ZipFile(static / "fsdp_helpers.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [*PROJECT.glob("fsdp_helpers/**/*"), *PROJECT.glob(f"{FAILURES}*.*")]:
            if path.suffix in (".py", ".md", ".toml", ".json", ".csv"):
                archive.write(path, path.relative_to(PROJECT))


def words_in(text: str) -> list[str]:
    return [word.strip().lower() for word in text.split(",")]


def id_of(word: str) -> str:
    return f"word-{re.sub(r'[^a-z0-9]+', '-', word)}"


class GlossaryLinks(SphinxPostTransform):
    """Gives the words of the glossary's first column their ids, and lets bold words everywhere lead to them."""

    default_priority = 500

    def run(self) -> None:
        glossary = self.env.get_doctree(GLOSSARY)
        words = {word for row in glossary.findall(nodes.row) for word in words_in(row[0].astext())}
        if self.env.docname == GLOSSARY:
            for row in self.document.findall(nodes.row):
                row[0]["ids"] += [id_of(word) for word in words_in(row[0].astext())]
            return
        page = self.app.builder.get_relative_uri(self.env.docname, GLOSSARY)
        for bold in list(self.document.findall(nodes.strong)):
            word = bold.astext().lower()
            if word in words and not isinstance(bold.parent, nodes.reference):
                link = nodes.reference("", "", bold.deepcopy(), refuri=f"{page}#{id_of(word)}", classes=["word"])
                bold.replace_self(link)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", prepare)
    app.connect("doctree-read", describe_pictures)
    app.connect("build-finished", add_python)
    app.add_post_transform(GlossaryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
