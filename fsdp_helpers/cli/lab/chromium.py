"""Printing a page with Chromium, if it is installed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
PRINT_S = 120  # for one page, on a busy machine


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def print_pdf(chromium: str, page: Path, pdf: Path) -> None:
    """Print a local page to a PDF, as its own style sheet says. Raises RuntimeError if Chromium fails."""
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-print-") as profile:
        command = [chromium, "--headless", "--disable-gpu", f"--user-data-dir={profile}", "--no-pdf-header-footer"]
        command += ["--no-sandbox"] * (hasattr(os, "getuid") and os.getuid() == 0)  # Chromium wants it of root
        command += [f"--print-to-pdf={pdf.resolve()}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PRINT_S)
    if done.returncode or not pdf.exists():
        raise RuntimeError(f"{chromium} did not print {page}: {done.stderr.strip()}")
