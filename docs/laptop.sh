#!/bin/sh
# Set up a laptop from the folder that `make offline` has prepared, with no network except the one that serves it.
#
#   sh laptop.sh http://ADDRESS:8000         # a machine that serves the folder
#   sh laptop.sh /path/to/the/stick/offline  # the folder itself
#
# It needs Python 3.11 or newer (PYTHON=python3.12 for one of several), git and make.
set -eu
stop() { echo "$1" >&2; exit 1; }

from=${1:?"give the address, http://ADDRESS:8000, or the path of the folder"}
from=${from%/}
python=${PYTHON:-python3}
for program in git make "$python"; do
  command -v "$program" > /dev/null || stop "$program must be installed first"
done
[ ! -e fsdp ] || stop "$PWD/fsdp is there already; remove it, or start in a different folder"
case $from in
  *://*) fetch() { curl --fail --silent --show-error --output "$2" "$from/$1"; } ;;
  *) from=$(cd "$from" && pwd); fetch() { cp "$from/$1" "$2"; } ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch contents.txt "$work/contents.txt"
there=$(sed -n 1p "$work/contents.txt")
here=$("$python" -c 'import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_platform())')
[ "$here" = "$there" ] || stop "the packages are for Python $there, this is Python $here; start with PYTHON=python3.x, \
or prepare a folder on a machine like this one"
fetch fsdp.bundle "$work/fsdp.bundle"
git -c advice.detachedHead=false clone --quiet "$work/fsdp.bundle" fsdp
git -C fsdp switch --quiet --create main # a bundle names no branch
git -C fsdp remote remove origin         # nor will it be there any more
mkdir -p fsdp/data/MNIST/raw
for name in $(sed 1d "$work/contents.txt"); do
  fetch "data/$name" "fsdp/data/MNIST/raw/$name"
done
host=${from#*://}
PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS="$from/packages/" PIP_TRUSTED_HOST=${host%%[:/]*} \
  make --no-print-directory -C fsdp .venv/installed PYTHON="$python" UV= # uv doesn't read PIP_ variables
echo "ready: cd fsdp, then make lab; no network is needed"
