import { run } from "./command_line.js";

const form = document.getElementById("explain");
const said = document.getElementById("said");
const FILE = /notebooks\/failures\/([a-z0-9-]+|README)\.(py|md)/g;

// The text of the command; a failure's file is a link to its page.
function show(text) {
  said.replaceChildren();
  let end = 0;
  for (const found of text.matchAll(FILE)) {
    const link = Object.assign(document.createElement("a"), { href: `../notebooks/failures/${found[1]}.html` });
    link.textContent = found[0];
    said.append(text.slice(end, found.index), link);
    end = found.index + found[0].length;
  }
  said.append(text.slice(end));
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  show((await run(["explain", "--", form.elements.message.value])).text);
});
