"""A CUDA driver for tests: torch believes in GPUs that do not exist. Built with gcc from what torch's packages bring.

The three C sources beside this file say what a simulated GPU can do. It can be counted, described and chosen; nothing
can be allocated or computed on it, so whatever uses it by mistake fails or is found in the log.
"""

import re
import site
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdp_helpers.gpus import TRIAL

SOURCES = Path(__file__).resolve().parent
WRITTEN = {"cuDriverGetVersion", "cuDevicePrimaryCtxGetState"}  # in driver.c; all other functions of cuda.h refuse
# nvcc's own header, which the packages leave out: what its words mean to a C compiler.
HOST_DEFINES = """\
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define __specialization_static
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
"""


@dataclass(frozen=True)
class Use:
    """A line of the log: what a process did with a device."""

    pid: int
    rank: str  # "-" in a process that is not a rank
    what: str
    command: str  # the start of the process's command line, on one line

    @property
    def is_trial(self) -> bool:
        """Whether this is the process in which the package tries a GPU, apart from ranks and kernels."""
        return " ".join(TRIAL.split())[:100] in " ".join(self.command.split())


@dataclass(frozen=True)
class SimulatedGpus:
    """The environment of a process that sees simulated GPUs, and what such processes did with them."""

    folder: Path
    log: Path

    def environment(self, count: int = 1, *, too_old: bool = False) -> dict[str, str]:
        """Variables for a child process; in this one CUDA's real library is loaded already."""
        variables = {
            "LD_PRELOAD": str(self.folder / "libsimulated_runtime.so"),
            "LD_LIBRARY_PATH": str(self.folder),
            "SIMULATED_GPU_COUNT": str(count),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),  # pytest hides real ones
            "SIMULATED_GPU_LOG": str(self.log),
        }
        return variables | ({"SIMULATED_GPU_TOO_OLD": "1"} if too_old else {})

    def uses(self) -> list[Use]:
        """What was done with a device since the log was begun."""
        if not self.log.exists():
            return []
        lines = [line.split("\t") for line in self.log.read_text().splitlines()]
        return [Use(int(pid), rank, what, command) for pid, rank, what, command in lines]

    def touched(self) -> list[Use]:
        """What ranks, kernels and all others did; a trial in a process of its own is meant to be."""
        return [use for use in self.uses() if not use.is_trial]


def cuda_headers() -> Path | None:
    """The folder of the CUDA headers that torch's packages have brought, if they have."""
    roots = {sysconfig.get_path("purelib"), *site.getsitepackages()}
    found = [path.parent for root in roots for path in Path(root).glob("nvidia/*/include/cuda_runtime_api.h")]
    return found[0] if found else None


def build(folder: Path) -> None:
    """Compile the three libraries into `folder`, under the names by which torch looks for them."""
    headers = cuda_headers()
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text(HOST_DEFINES)
    (folder / "refused.c").write_text(refusals(driver_functions(headers)))
    compiler = ["gcc", "-shared", "-fPIC", "-O1", f"-I{headers}", f"-I{folder}"]
    libraries = {
        "libsimulated_runtime.so": [SOURCES / "runtime.c"],
        "libcuda.so.1": [SOURCES / "driver.c", folder / "refused.c"],
        "libnvidia-ml.so.1": [SOURCES / "management.c"],
    }
    for name, sources in libraries.items():
        subprocess.run([*compiler, *map(str, sources), "-o", str(folder / name)], check=True)


def driver_functions(headers: Path) -> set[str]:
    """The names that libcuda exports, as the preprocessor leaves them: many carry a version, such as cuMemAlloc_v2."""
    command = ["gcc", "-E", "-P", f"-I{headers}", "-x", "c", str(headers / "cuda.h")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", text))


def refusals(names: Iterable[str]) -> str:
    """C source in which every function but those of driver.c says 801, CUDA_ERROR_NOT_SUPPORTED."""
    return "".join(f"int {name}(void) {{ return 801; }}\n" for name in sorted(set(names) - WRITTEN))
