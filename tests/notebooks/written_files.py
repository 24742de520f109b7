"""The modules that a chapter writes with `%%writefile`, for tests that run them."""

from chapters import FILE, body, code_cells, read_chapter


def written_files(number: str) -> dict[str, str]:
    """By name, the files that the cells of the chapter's body write; `%%writefile -a` adds to one."""
    files: dict[str, str] = {}
    for cell in code_cells(body(read_chapter(number))):
        magic, _, text = cell.source.partition("\n")
        if found := FILE.match(magic):
            files[found[1]] = (files.get(found[1], "") if " -a " in magic else "") + f"{text}\n"
    return files
