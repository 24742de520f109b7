// Sections that have all words; those with the words in their heading come first.
const box = document.getElementById("search");
const found = document.getElementById("found");

function entry(section) {
  const item = document.createElement("li");
  const link = document.createElement("a");
  link.href = `${section.page}#${section.anchor}`;
  link.textContent = section.title === section.chapter ? section.title : `${section.chapter} › ${section.title}`;
  item.append(link);
  return item;
}

box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const inHeading = (section) => words.filter((word) => section.title.toLowerCase().includes(word)).length;
  const has = (section, word) => section.text.includes(word) || section.title.toLowerCase().includes(word);
  const hits = words.length ? SECTIONS.filter((section) => words.every((word) => has(section, word))) : [];
  hits.sort((a, b) => inHeading(b) - inHeading(a));
  found.replaceChildren(...hits.slice(0, 15).map(entry));
});
