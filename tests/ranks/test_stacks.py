"""Where a rank hangs: the reader's line, wherever the libraries are installed."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fsdp_helpers.ranks import stacks

STACK = """Current thread 0x00007f (most recent call first):
  File "{torch}/distributed/distributed_c10d.py", line 4181 in all_reduce
  File "{torch}/distributed/c10d_logger.py", line 83 in wrapper
  File "{reader}", line 7 in train
  File "{body}", line 40 in run_worker
"""
BODY = stacks.BODIES_OF_RANKS[1]


@pytest.mark.parametrize(
    "folder",
    [
        "/usr/lib/python3/dist-packages",
        "/venv/lib64/python3.11/site-packages",
        "/home/me/.local/lib/python3.11/site-packages",
    ],
)
def test_packages_are_libraries_wherever_they_are(folder, tmp_path):
    file = tmp_path / "stack"
    file.write_text(STACK.format(torch=f"{folder}/torch", reader="/work/train.py", body=BODY))
    assert stacks.describe(file) == "was waiting in all_reduce(), called from train.py line 7, in train"
    assert stacks.is_in_collective(file)


def test_torch_that_a_pth_file_leads_to(tmp_path):
    """A folder with any name that holds torch, as an environment built on another one's packages has."""
    torch = Path(stacks.importlib.util.find_spec("torch").origin).parent
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "torch").symlink_to(torch)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "base.pth").write_text(f"{tmp_path / 'elsewhere'}\n")
    file = tmp_path / "stack"
    file.write_text(STACK.format(torch=tmp_path / "elsewhere" / "torch", reader="/work/train.py", body=BODY))
    code = (
        "import site, sys\n"
        f"site.addsitedir({str(tmp_path / 'site')!r})\n"
        "sys.path.reverse()  # what the .pth file names comes first\n"
        "from pathlib import Path\n"
        "from fsdp_helpers.ranks import stacks\n"
        f"print(stacks.describe(Path({str(file)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "was waiting in all_reduce(), called from train.py line 7, in train\n"
    assert not str(tmp_path).startswith(sysconfig.get_path("purelib"))
