#!/bin/bash
# Two machines and plain ssh: start the same torchrun on both; they meet on the first. For example, from either one:
#
#   bash two_machines.sh first.example.org second.example.org /shared/checkpoint.py /shared/run 1000
#
# Both need the same Python environment under the same path, a folder that both can see, and an open port between them.
# If you don't trust the network, use a private one: anyone who can reach the port can join the run.
first=$1; second=$2; shift 2
ranks_per_node=${RANKS_PER_NODE:-1}
port=$(ssh "$first" python3 -c "'import socket; s = socket.socket(); s.bind((\"\", 0)); print(s.getsockname()[1])'")
run_id=$RANDOM
command=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "$(command -v torchrun)" --nnodes=2 --nproc-per-node="$ranks_per_node"
    --rdzv-backend=c10d --rdzv-id="$run_id" --rdzv-endpoint="$first:$port" --max-restarts=3 "$@")

trap 'kill $(jobs -p) 2>/dev/null' EXIT
for machine in "$first" "$second"; do
    # -tt: when this script ends, the remote torchrun ends too, after giving its ranks time to save a checkpoint
    ssh -tt "$machine" "cd $(printf %q "$PWD") && $(printf '%q ' "${command[@]}")" &
done
wait
