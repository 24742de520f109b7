#!/bin/bash
# Two machines and plain ssh: the same torchrun on both, which meet on the first. For example, from either of them:
#
#   bash two_machines.sh first.example.org second.example.org /shared/checkpoint.py /shared/run 1000
#
# Both need the same Python environment under the same path, a folder that both see, and an open port between them.
# Where the network is not trusted, keep to a private one: whoever reaches the port can take part.
first=$1; second=$2; shift 2
ranks_per_node=${RANKS_PER_NODE:-1}
port=$(ssh "$first" python3 -c "'import socket; s = socket.socket(); s.bind((\"\", 0)); print(s.getsockname()[1])'")
run_id=$RANDOM
command=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "$(command -v torchrun)" --nnodes=2 --nproc-per-node="$ranks_per_node"
    --rdzv-backend=c10d --rdzv-id="$run_id" --rdzv-endpoint="$first:$port" --max-restarts=3 "$@")

trap 'kill $(jobs -p) 2>/dev/null' EXIT
for machine in "$first" "$second"; do
    # -tt: when this script ends, so does the torchrun over there, which gives its ranks the time for a checkpoint
    ssh -tt "$machine" "cd $(printf %q "$PWD") && $(printf '%q ' "${command[@]}")" &
done
wait
