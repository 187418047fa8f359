#!/usr/bin/env bash
# A sweep on the nodes of a Slurm allocation: starts Ray on each, runs `mla-var3 sweep launcher=ray`, stops Ray.
#   sbatch -N 4 --gpus-per-node=8 scripts/slurm_sweep.sh experiment=decode kernels=dispatch,cute,peer
# Submitted again, it goes on where it ended. Before: activate the environment that has mla_var3[ray], on a file system
# that all nodes see. docs/cluster.md has more.
#SBATCH --job-name=mla-var3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: sbatch -N NODES --gpus-per-node=G $0 experiment=NAME [KEY=VALUE ...]" >&2; exit 2; }

nodes=$SLURM_JOB_NUM_NODES
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A port of this job's own: two jobs may share a node.
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_ADDRESS="$head:$port" RAY_USAGE_STATS_ENABLED=0
# Whoever can reach a cluster without a token can run programs on it.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# Ray would count the CPUs of the machine, not those of the allocation.
cpus=(--num-cpus "${SLURM_CPUS_PER_TASK:-$(nproc)}")

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
  env -u RAY_ADDRESS ray start --head --port="$port" --include-dashboard=false "${cpus[@]}" --block &
if [ "$nodes" -gt 1 ]; then
  # `ray start` waits for a head that is not there yet.
  srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --overlap --exclude="$head" \
    ray start --address="$RAY_ADDRESS" "${cpus[@]}" --block &
fi

python - "$nodes" <<'PY'
import os, socket, sys, time
import ray

host, port = os.environ["RAY_ADDRESS"].rsplit(":", 1)
deadline = time.monotonic() + 300
while time.monotonic() < deadline:
    try:
        socket.create_connection((host, int(port)), 5).close()
        break
    except OSError:
        time.sleep(1)
else:
    sys.exit(f"Ray did not start on {host} in 300 s.")
ray.init(logging_level="ERROR", log_to_driver=False)
while (there := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[1]):
    if time.monotonic() > deadline:
        print(f"{there} of {sys.argv[1]} nodes came in 300 s: going on with them.", file=sys.stderr)
        break
    time.sleep(1)
PY

mla-var3 sweep launcher=ray "$@" resume=true
