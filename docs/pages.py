"""What Sphinx has to know of these pages: JupyterLab's anchors, outputs that need a kernel, figures' descriptions, words.

The words are those of the glossary.
"""

import json
import re
from base64 import b64decode
from hashlib import sha256
from pathlib import PurePosixPath

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

GLOSSARY = "notebooks/GLOSSARY"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)")  # to a folder, it leads nowhere on a site
DESCRIPTIONS: dict[str, str] = {}  # of all pictures so far, by the digests that name their files
SCRIPT = re.compile(
    r'<a href=\\"failures/[^"]*\.py\\">([^<]*)</a>'
)  # in HTML; Sphinx copies only files that Markdown links to
CONTENTS = """
```{toctree}
:hidden:
:glob:

notebooks/[0-9]*
notebooks/GLOSSARY
notebooks/WORKSHOP
notebooks/failures/README
COMMANDS
CONTRIBUTING
CHANGELOG
AGENTS
docs/gpu-record
```
"""
FAILURES = "notebooks/failures/README"
TEXTS = """
```{toctree}
:hidden:
:glob:

*
```
"""


def anchor_of(title: str) -> str:
    """Return the anchor that JupyterLab gives a heading; links between the notebooks use it."""
    return title.replace("`", "").replace(" ", "-")


def prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the contents to the first page; remove outputs that need a kernel, and those of unsolved exercises."""
    if name == app.config.root_doc:
        source[0] = LINK.sub(lambda link: link[1] if (app.srcdir / link[2]).is_dir() else link[0], source[0]) + CONTENTS
    elif name == FAILURES:
        source[0] += TEXTS
    elif source[0].startswith("{"):
        notebook = json.loads(source[0])
        notebook["metadata"].pop("widgets", None)
        for cell in notebook["cells"]:
            if "exercise" in cell["metadata"].get("tags", []):
                cell["outputs"] = []
            elif "outputs" in cell:
                cell["outputs"] = [one for one in cell["outputs"] if not needs_a_kernel(one)]
                DESCRIPTIONS.update(map(described, filter(has_description, cell["outputs"])))
        source[0] = SCRIPT.sub(r"\1", json.dumps(notebook))


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
    app.add_post_transform(GlossaryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
