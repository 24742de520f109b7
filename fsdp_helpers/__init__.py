"""Everything a worker process runs in the notebooks, one idea a module.

Importing this package imports nothing else: it is instant and starts nothing.
Import the module you need, for example `from fsdp_helpers.launch import launch`.
"""

__version__ = "1.0.0"
