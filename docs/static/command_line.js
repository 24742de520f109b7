// Runs the package's own command line in the browser: what a page shows is what a terminal shows.

const RUN = `
import contextlib, io, json
from fsdp_helpers.__main__ import build_parser, main
from fsdp_helpers.cli.plan_command import read_plan
from fsdp_helpers.quantities import format_bytes

def run(words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(list(words))
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()

def choices(command):
    commands = next(action.choices for action in build_parser()._actions if action.dest == "command")
    flags = {action.option_strings[-1][2:]: action for action in commands[command]._actions if action.choices}
    return json.dumps({name: [action.default, list(action.choices)] for name, action in flags.items()})

def bytes_of(words):
    plan = read_plan(build_parser().parse_args(words))[1].to_json()
    cluster, terms = plan["cluster"], [row for row in plan["terms"] if row["bytes"]]
    rows = [[row["term"], row["bytes"], f'{format_bytes(row["bytes"])} = {row["formula"]}'] for row in terms]
    rows.append(["allowance", cluster["allowance_bytes"], format_bytes(round(cluster["allowance_bytes"]))])
    limit = cluster["device_memory_bytes"]
    if limit:
        rows.append(["the line: what a device has", 0, format_bytes(limit)])
    return json.dumps({"rows": rows, "limit": limit})
`;
const here = new URL(".", import.meta.url);
const state = document.getElementById("state");
let python = null;

async function load() {
  state.textContent = "Loading Python (13 MB, kept by the browser) ...";
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", here));
  const loaded = await loadPyodide({ indexURL: new URL("pyodide/", here).href });
  state.textContent = "Loading the package (1 MB) ...";
  const archive = await fetch(new URL("fsdp_helpers.zip", here));
  loaded.unpackArchive(await archive.arrayBuffer(), "zip");
  state.textContent = "Importing it ...";
  loaded.runPython(RUN);
  state.textContent = "";
  return loaded;
}

function ready() {
  python ??= load().catch((error) => {
    python = null;
    state.textContent = `This page needs a server that hands out its files, such as \`python -m http.server\`: ${error.message}`;
    throw error;
  });
  return python;
}

export async function choices(command) {
  return JSON.parse((await ready()).globals.get("choices")(command));
}

// Writes the files, runs one command and returns its exit status and what it prints.
export async function run(words, files = {}) {
  const loaded = await ready();
  for (const [name, text] of Object.entries(files)) loaded.FS.writeFile(name, text);
  state.textContent = "Running ...";
  await new Promise((shown) => setTimeout(shown, 20)); // the browser draws the line above
  const [status, text] = loaded.globals.get("run")(words).toJs();
  state.textContent = "";
  return { status, text };
}

export async function bytesOf(words) {
  return JSON.parse((await ready()).globals.get("bytes_of")(words));
}
