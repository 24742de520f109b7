"""JupyterLab as a person meets it: started as `make lab` starts it, in Chromium, on copies of the notebooks.

Screenshots of what failed, and of each notebook, are kept in .pytest_cache/browser, for whoever looks into a run.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from leftovers import PROJECT, SESSION_VARIABLE
from programs import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: `make test-browser` installs it")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the search path: `apt-get install chromium`"),
]
NOTEBOOKS = sorted(path.name for path in (PROJECT / "notebooks").glob("*.ipynb"))
SHOTS = PROJECT / ".pytest_cache" / "browser"
PROJECTOR = {"width": 1280, "height": 720}
START_S, CELL_S, NOTEBOOK_S = 300.0, 180.0, 3_000.0  # patience, also on a busy machine
OURS_FOR_A_WHILE = ("fsdp_helpers-*", "pymp-*", "torchelastic_*", "tmp*")  # temporary files of ranks and of torchrun
INTERRUPT = ':is([data-command="notebook:interrupt-kernel"], [data-jp-item-name="interrupt"])'
CLOSE_ALL = """async () => {
    const app = window.jupyterapp;
    [...app.shell.widgets("main")].forEach(panel => panel.dispose());
    await app.serviceManager.sessions.shutdownAll();
    await app.serviceManager.terminals.shutdownAll();
}"""
# It goes on for longer than any test waits, also on the bundled digits.
LONG_RUN = """from fsdp_helpers import TrainConfig, launch, train
from fsdp_helpers.teaching.lessons.many_machines import add_up_without
train(TrainConfig(model="simple", strategy="ddp", epochs=100_000), device="cpu", watch={watch})"""

TRACED = """%%ranks --trace
import torch
from torch.distributed.fsdp import fully_shard
model = fully_shard(torch.nn.Sequential(fully_shard(torch.nn.Linear(500, 500)), torch.nn.Linear(500, 10)))
model(torch.ones(8, 500)).sum().backward()"""


class Lab:
    """A running server and a page that shows it."""

    def __init__(self, url: str, work: Path, server: int, page) -> None:
        self.url, self.work, self.server, self.page = url, work, server, page

    def open(self, name: str) -> None:
        """Show a notebook of the working folder, and wait for its kernel."""
        path = (self.work / name).relative_to(PROJECT).as_posix()
        self.run("docmanager:open", path=path)
        self.wait(f"app.shell.currentWidget?.context?.path === {path!r} && app.shell.currentWidget.context.isReady")
        self.wait("app.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")

    def evaluate(self, code: str) -> object:
        return self.page.evaluate(f"(() => {{ const app = window.jupyterapp; return {code}; }})()")

    def wait(self, condition: str, timeout_s: float = START_S) -> None:
        code = f"() => {{ const app = window.jupyterapp; return {condition}; }}"
        self.page.wait_for_function(code, timeout=1_000 * timeout_s, polling=100)

    def run(self, command: str, **arguments: str) -> None:
        """One of JupyterLab's commands, as its menus give them; does not wait for its end."""
        self.page.evaluate(
            "([command, given]) => { window.jupyterapp.commands.execute(command, given); }", [command, arguments]
        )

    def run_cell(self, index: int) -> None:
        """Run one cell, and wait for its end."""
        self.go_to(index)
        self.run("notebook:run-cell")
        assert wait_until(lambda: self.cells()[index].get("execution_count") and self.is_idle(), CELL_S)

    def is_idle(self) -> bool:
        return self.evaluate("app.shell.currentWidget.sessionContext.session?.kernel?.status") == "idle"

    def trusts_all(self) -> bool:
        cells = "[...app.shell.currentWidget.content.model.cells].filter(cell => cell.type === 'code')"
        return self.evaluate(f"{cells}.every(cell => cell.trusted)")

    def close_all(self) -> None:
        """Close what is open, and shut down all kernels and terminals."""
        self.page.evaluate(CLOSE_ALL)

    def cells(self) -> list[dict]:
        return self.evaluate("app.shell.currentWidget.content.model.sharedModel.toJSON().cells")

    def go_to(self, index: int) -> None:
        self.page.evaluate(
            "index => { const content = window.jupyterapp.shell.currentWidget.content;"
            " content.activeCellIndex = index; content.scrollToItem(index); }",
            index,
        )

    def shown(self, selector: str):
        """The first element of this kind in the notebook that is in front."""
        return self.page.locator(f".jp-NotebookPanel:not(.lm-mod-hidden) {selector}").first

    def output_of(self, index: int) -> str:
        return "\n".join(text_of(output) for output in self.cells()[index]["outputs"])

    def wait_for_output(self, index: int, pattern: str) -> str:
        """Return the first output that has the pattern: a running cell's may be a different one a moment later."""
        seen = [""]

        def has_it() -> bool:
            seen.append(self.output_of(index))
            return re.search(pattern, seen[-1]) is not None

        assert wait_until(has_it, CELL_S), f"{pattern!r} is not in {seen[-1]!r}"
        return seen[-1]

    def shoot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")


def text_of(output: dict) -> str:
    if output["output_type"] == "error":
        return "\n".join(output["traceback"])
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return text if isinstance(text, str) else "".join(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[str, Path, int]]:
    """`make lab`, with this environment in the place of the one that it would install."""
    home = tmp_path_factory.mktemp("lab")
    work = PROJECT / "work" / f"browser-{os.getpid()}"
    environment = {**os.environ, "IPYTHONDIR": str(home), "JUPYTER_CONFIG_DIR": str(home), "TMPDIR": str(home)}
    environment |= {"JUPYTER_DATA_DIR": str(home / "data")}  # with the signatures
    environment |= {"JUPYTER_RUNTIME_DIR": str(home), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings")}
    environment |= {"JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "PYTHONPATH": str(PROJECT)}
    environment.pop(SESSION_VARIABLE, None)  # the server lives for several tests, each of which may leave nothing
    arguments = [f"BIN={Path(sys.executable).parent}", f"WORK={work.relative_to(PROJECT)}"]
    arguments.append("LAB_ARGS=--no-browser --expose-app-in-browser --ServerApp.port=0")
    command = ["make", "--no-print-directory", "--old-file=.venv/installed", "lab", *arguments]
    with open(home / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield address(home / "log", process), work, process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(CELL_S)
        assert wait_until(lambda: not members(process.pid), CELL_S), "the server's kernels outlive it"
        shutil.rmtree(work, ignore_errors=True)
        assert wait_until(lambda: not left_in(home), CELL_S), f"left by kernels, or by their cells: {left_in(home)}"


def left_in(folder: Path) -> list[str]:
    return [path.name for kind in OURS_FOR_A_WHILE for path in folder.glob(kind)]


def address(log: Path, process: subprocess.Popen) -> str:
    def found() -> re.Match | None:
        return re.search(r"http://(?:localhost|127\.0\.0\.1):\d+/lab/tree/\S+token=\w+", log.read_text())

    assert wait_until(lambda: found() or process.poll() is not None, START_S) and found(), log.read_text()
    return found()[0]


def members(session: int) -> list[int]:
    """The processes of the server's session and of the kernels that it has started, which have one of their own."""
    parents, sessions = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(path.name)], sessions[int(path.name)] = int(fields[1]), int(fields[3])
    found = {pid for pid, number in sessions.items() if number == session}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


@pytest.fixture(scope="module")
def lab(server, tmp_path_factory) -> Iterator[Lab]:
    url, work, pid = server
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.delenv(SESSION_VARIABLE)  # the browser, too, lives for several tests
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("browser")))
        playwright = stack.enter_context(sync_api.sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.getuid() == 0))
        page = browser.new_page(viewport={"width": 1440, "height": 900}, device_scale_factor=2)
        page.set_default_timeout(1_000 * CELL_S)  # clicks, looks and pictures wait as long as everything else
        page.goto(url)
        one = Lab(url, work, pid, page)
        one.wait("app?.shell?.currentWidget?.context?.isReady")
        yield one
        browser.close()


@pytest.fixture(autouse=True)
def kept_in_a_picture_and_closed(lab, request) -> Iterator[None]:
    """After each test, also one that failed: a picture, then no open panel, no kernel and no terminal."""
    yield
    try:
        lab.shoot(re.sub(r"\W+", "-", request.node.name))
    finally:
        lab.close_all()


@pytest.fixture
def scratch(lab) -> Callable[..., None]:
    """Return a function that opens a fresh notebook with these cells."""

    def open_one(*sources: str) -> None:
        name = f"scratch-{time.monotonic_ns()}.ipynb"
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), lab.work / name)
        lab.open(name)

    return open_one


def ranks_of(server: int) -> list[int]:
    """Processes that a fork server of a kernel has started: ranks."""
    found = []
    for pid in members(server):
        with suppress(OSError):
            parent = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())[1]
            if "multiprocessing.forkserver" in Path(f"/proc/{parent}/cmdline").read_text():
                found.append(pid)
    return found


# ---------------------------------------------------------------- the first screen


def test_the_first_notebook_opens_by_itself_under_the_name_of_the_tutorial(lab):
    assert lab.evaluate("app.shell.currentWidget.context.path").endswith("/00_start_here.ipynb")
    lab.wait("app.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")
    assert lab.evaluate("app.shell.currentWidget.sessionContext.kernelDisplayName") == "Python 3 (ipykernel)"
    assert lab.page.locator("text=official Jupyter news").count() == 0


def test_a_terminal_has_the_environment(lab):
    lab.run("terminal:create-new")
    lab.wait("app.shell.currentWidget?.content?.session?.connectionStatus === 'connected'")
    result = lab.work / "python-of-the-terminal"
    lab.evaluate(
        "app.shell.currentWidget.content.session.send({type: 'stdin', content: "
        f"""['python -c "import sys, filelock; print(sys.prefix)" > {result.as_posix()} 2>&1\\r']}}) ?? null"""
    )
    assert wait_until(lambda: result.exists() and result.read_text().strip(), CELL_S)
    assert result.read_text().strip() == sys.prefix


# ---------------------------------------------------------------- every notebook


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(lab, name):
    kept = nbformat.read(PROJECT / "notebooks" / name, as_version=4)
    lab.open(name)
    lab.run("notebook:clear-all-cell-outputs")
    lab.run("notebook:run-all-cells")
    last = max(place for place, cell in enumerate(kept.cells) if cell.cell_type == "code")
    assert wait_until(lambda: lab.cells()[last].get("execution_count") and lab.is_idle(), NOTEBOOK_S)
    for place, (cell, before) in enumerate(zip(lab.cells(), kept.cells, strict=True)):
        errors = [output for output in cell.get("outputs", []) if output["output_type"] == "error"]
        if "raises-exception" not in before.metadata.get("tags", []):
            assert errors == [], f"{name}, cell {place}"
        assert num_pictures(cell) == num_pictures(before), f"{name}, cell {place}"
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                assert len(output["metadata"]["image/png"]["alt"]) > 10, f"{name}, cell {place}"
    see_pictures(lab)


def open_unsigned(lab: Lab, name: str) -> list[dict]:
    """Open an unsigned copy of a notebook; return its cells."""
    unsigned = nbformat.read(PROJECT / "notebooks" / name, as_version=4)
    unsigned.metadata["signed"] = "not with this line"
    nbformat.write(unsigned, lab.work / f"unsigned-{name}")
    lab.open(f"unsigned-{name}")
    assert not lab.trusts_all()
    return lab.cells()


def test_a_notebook_never_run_here_has_colored_listings_and_descriptions(lab):
    """JupyterLab cleans the outputs of a notebook that it does not trust: what is left is what a reader sees first."""
    cells = open_unsigned(lab, "01_local_training.ipynb")
    listing = next(place for place, cell in enumerate(cells) if cell["source"].startswith("show.source("))
    lab.go_to(listing)
    page_color, colors = lab.shown(f'[data-windowed-list-index="{listing}"] .jp-OutputArea pre').evaluate(
        "pre => [getComputedStyle(pre).color,"
        " [...pre.querySelectorAll('span')].map(span => getComputedStyle(span).color)]"
    )
    assert len({*colors} - {page_color}) >= 3
    cells = open_unsigned(lab, "03_fsdp.ipynb")
    motion = next(place for place, cell in enumerate(cells) if cell["source"].endswith("animation.animated(step)"))
    drawn = next(place for place, cell in enumerate(cells) if num_pictures(cell))
    lab.go_to(motion)
    alt = lab.shown(f'[data-windowed-list-index="{motion}"] .jp-OutputArea img').get_attribute("alt")
    assert alt.startswith("One step of FSDP on two ranks")
    for place in (motion, drawn):
        lab.go_to(place)
        folded = lab.shown(f'[data-windowed-list-index="{place}"] .jp-OutputArea details')
        assert folded.locator("summary").text_content() == "In words" and len(folded.text_content()) > 60


def test_the_copies_to_work_in_are_trusted(lab):
    lab.open("03_fsdp.ipynb")
    assert lab.trusts_all()


def num_pictures(cell: dict) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def see_pictures(lab: Lab) -> None:
    """Scroll to each picture: it is drawn, with two pixels for each that it takes."""
    for place, cell in enumerate(lab.cells()):
        if num_pictures(cell):
            lab.go_to(place)
            image = lab.shown(f'[data-windowed-list-index="{place}"] .jp-OutputArea img')
            image.wait_for(state="visible")
            width, shown = image.evaluate("image => [image.naturalWidth, image.width]")
            assert width == pytest.approx(2 * shown, abs=4)


# ---------------------------------------------------------------- the stop button


@pytest.mark.parametrize("watch", [False, True])
def test_the_stop_button(lab, scratch, watch):
    scratch(LONG_RUN.format(watch=watch), "launch(add_up_without, -1, world_size=2)[1]")
    lab.go_to(0)
    lab.run("notebook:run-cell")
    lab.wait_for_output(0, r"images/s, rank 0's loss")
    if watch:
        lab.wait_for_output(0, r"(?s)rank 0: .*\nrank 1: .*rank 1's loss .*Loss of rank 0's images")
    assert ranks_of(lab.server)
    lab.shoot(f"running-watch-{watch}")
    lab.shown(INTERRUPT).click()
    shown = lab.wait_for_output(0, "interrupted; all ranks are stopped")
    assert "Traceback" not in shown and "launch.py" not in shown
    assert wait_until(lambda: ranks_of(lab.server) == [], CELL_S)
    lab.go_to(1)
    lab.run("notebook:run-cell")
    lab.wait_for_output(1, r"^2\.0$|\n2\.0$")


# ---------------------------------------------------------------- the planner, on a projector


@pytest.fixture
def projector(lab) -> Iterator[None]:
    """A window as small as a projector's picture, until the test is over."""
    before = lab.page.viewport_size
    lab.page.set_viewport_size(PROJECTOR)
    yield
    lab.page.set_viewport_size(before)


def is_on_a_projector(box: dict | None) -> bool:
    return box is not None and (
        min(box["x"], box["y"]) >= 0
        and box["x"] + box["width"] <= PROJECTOR["width"]
        and box["y"] + box["height"] <= PROJECTOR["height"]
    )


def test_the_verdict_is_on_the_first_screen_and_follows_the_controls(lab, projector):
    lab.open("09_planning.ipynb")
    sources = [cell["source"] for cell in lab.cells()]
    set_up = next(place for place, source in enumerate(sources) if "import" in source and "sliders" in source)
    controls = next(place for place, source in enumerate(sources) if source.startswith("sliders.plan_controls("))
    lab.run("notebook:clear-all-cell-outputs")
    for place in (set_up, controls):
        lab.run_cell(place)
    output = f'[data-windowed-list-index="{controls}"] .jp-OutputArea'
    figure = lab.shown(f"{output} img")  # with the verdict as its first line
    figure.wait_for()
    lab.go_to(controls)
    for element in (lab.shown(f"{output} select"), figure):
        assert wait_until(lambda element=element: is_on_a_projector(element.bounding_box())), element.bounding_box()
    tracks = lab.shown(output).locator(".noUi-target")
    assert tracks.count() == 2 and all(track.bounding_box()["width"] > 80 for track in tracks.all()), "can be dragged"
    before = figure.get_attribute("src")
    lab.shown(f"{output} select").select_option("llama-70b")
    assert wait_until(lambda: figure.get_attribute("src") != before, CELL_S)


def test_a_traced_cell_is_there_once_it_is_saved_and_opened_again_on_a_narrow_page_too(lab, scratch, projector):
    scratch("%load_ext fsdp_helpers\nfrom fsdp_helpers import Ranks\nranks = Ranks(2, device='cpu')", TRACED)
    for place in (0, 1):
        lab.run_cell(place)
    path = Path(lab.evaluate("app.shell.currentWidget.context.path"))
    lab.run("docmanager:save")
    lab.wait("!app.shell.currentWidget.context.model.dirty")
    lab.close_all()  # and its kernel
    lab.open(path.name)
    lab.evaluate("app.shell.collapseLeft() ?? null")
    for theme, width in itertools.product(("Dark", "Light"), (400, 1400)):
        lab.run("apputils:change-theme", theme=f"JupyterLab {theme}")
        lab.page.set_viewport_size({"width": width, "height": 900})
        lab.go_to(1)
        image = lab.shown('[data-windowed-list-index="1"] .jp-OutputArea img')
        image.wait_for(state="visible")
        assert 0.4 * width < image.bounding_box()["width"] <= width - image.bounding_box()["x"]
        lab.shoot(f"traced-{width}-{theme}")
    table = lab.shown('[data-windowed-list-index="1"] .jp-OutputArea table').text_content()
    assert "all-gather" in table and "reduce-scatter" in table
