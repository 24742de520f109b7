"""Take README's picture from the saved output of notebook 04: `make figures`."""

import base64
import json
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PICTURE = NOTEBOOKS / "images" / "peak_by_ranks.png"


def saved_picture() -> bytes:
    """Return the PNG that 04's cell with `plot_peak_by_ranks` shows."""
    cells = json.loads((NOTEBOOKS / "04_fsdp_auto_wrap.ipynb").read_text())["cells"]
    (cell,) = [cell for cell in cells if "plots.plot_peak_by_ranks(" in "".join(cell["source"])]
    (picture,) = [output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})]
    return base64.b64decode(picture)


if __name__ == "__main__":
    PICTURE.write_bytes(saved_picture())
