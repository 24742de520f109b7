"""Short documents to train a language model on."""

import importlib
import inspect

# Modules of Python's standard library with well-documented functions.
DOCUMENTED = (
    "builtins ast asyncio bisect calendar codecs copy difflib dis email fnmatch functools gc gettext glob heapq html "
    "imaplib inspect json linecache locale logging math mimetypes operator os pickle platform pprint random re select "
    "shutil signal site socket sqlite3 ssl statistics subprocess symtable sys sysconfig tempfile textwrap threading "
    "time timeit tokenize traceback types typing unittest uuid warnings weakref zipfile zlib"
).split()


def docstring_documents(*, longest: int = 256) -> list[str]:
    """Return a sorted list of docstrings of 8 to `longest` bytes from functions in Python's standard library."""
    found = set()
    for module in map(importlib.import_module, DOCUMENTED):
        for name, thing in inspect.getmembers(module, inspect.isroutine):
            text = inspect.getdoc(thing)
            if text and not name.startswith("_") and 8 <= len(text.encode()) <= longest:
                found.add(text)
    return sorted(found)
