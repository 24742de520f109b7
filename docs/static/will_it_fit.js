import { bytesOf, choices, run } from "./command_line.js";

const form = document.getElementById("plan");
const said = document.getElementById("said");
const bytes = document.getElementById("bytes");

// A row of the waterfall begins where the one above ends; the line is what the device has.
function drawBytes({ rows, limit }) {
  const all = rows.reduce((sum, [, size]) => sum + size, 0);
  const most = Math.max(all, limit ?? 0);
  let start = 0;
  bytes.replaceChildren(...rows.map(([name, size, text]) => {
    const row = document.createElement("div");
    const [title, bar, numbers] = ["span", "i", "span"].map((tag) => row.appendChild(document.createElement(tag)));
    title.textContent = name;
    bar.style.setProperty("--start", `${(100 * start) / most}%`);
    bar.style.setProperty("--size", `${(100 * size) / most}%`);
    if (limit) bar.style.setProperty("--limit", `${(100 * limit) / most}%`);
    if (limit && start + size > limit) bar.className = "over";
    numbers.textContent = text;
    start += size;
    return row;
  }));
  bytes.ariaLabel = `Bytes on a rank, added up: ${rows.map(([name, , text]) => `${name} ${text}`).join("; ")}`;
}

async function plan() {
  const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value.trim()));
  history.replaceState(null, "", `#${new URLSearchParams(given)}`); // a link that carries the settings
  const { config, model, ...rest } = given;
  const subject = config ? ["--config", "config.json"] : ["--model", model];
  const flags = Object.entries(rest).flatMap(([name, value]) => [`--${name}`, value]);
  const files = config ? { "config.json": config } : {};
  const words = ["plan", ...subject, ...flags];
  const { status, text } = await run(words, files);
  said.textContent = text;
  bytes.replaceChildren();
  if (status === 0) drawBytes(await bytesOf(words));
}

async function fill() {
  const known = await choices("plan");
  for (const list of form.querySelectorAll("select")) {
    const [usual, values] = known[list.name];
    const first = { model: "llama-8b", device: "h100", precision: "" }[list.name] ?? usual;
    if (list.name === "precision") values.unshift("");
    list.replaceChildren(...values.map((value) => new Option(value || "as the device has it", value, value === first, value === first)));
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  plan();
});
await fill();
const linked = new URLSearchParams(location.hash.slice(1));
for (const [name, value] of linked) if (form.elements[name]) form.elements[name].value = value;
if (linked.size) plan();
