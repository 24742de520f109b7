#!/bin/sh
# Set up the project in a container that has Python, git and make: what the Dockerfile and the devcontainer run.
#
#   sh docs/container.sh               # with PyTorch's CPU build
#   TORCH= sh docs/container.sh        # with the ordinary one, which includes the CUDA libraries
#   sh docs/container.sh --dry-run     # print the commands
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch=${TORCH-cpu}
run() { "$@"; }
[ "${1:-}" != --dry-run ] || run() { echo "$@"; }

for program in git make "$python"; do
  command -v "$program" > /dev/null || { echo "$program must be installed first" >&2; exit 1; }
done
# Docker writes a container's own name, where torchrun's ranks meet, to this file; a bare root file system lacks it.
[ -e /etc/hosts ] || run sh -c 'echo "127.0.0.1 localhost $(uname -n)" > /etc/hosts'
run make --no-print-directory .venv/installed "TORCH=$torch" "PYTHON=$python"
run .venv/bin/python -m fsdp_helpers doctor
