#!/bin/bash
# slurm.sh up|down: Slurm on the hosts of cluster.sh: a munged on each, slurmctld on the first, a slurmd on the others.
#
#   HCROOT          scratch folder of the cluster
#   HC_SLURM_EXTRA  further lines for slurm.conf
#
# All state lies in the hosts' private /run, which ends with them; the logs are in $HCROOT/run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${HCROOT:?set HCROOT to the scratch folder of the cluster}
run=$root/run
etc=$root/etc
[ -e "$run/nodes" ] || { [ "${1:-}" = down ] && exit 0; echo "slurm.sh: no cluster in $root" >&2; exit 1; }
read -ra nodes < "$run/nodes"
head=${nodes[0]}
workers=("${nodes[@]:1}")

logs() { find "$run" -name '*.log' -size +0 -exec tail -v -n 5 {} + >&2 || true; }

on() { "$here/on" "$@" < /dev/null; }

wait_for() {
  local i
  for ((i = 0; i < 200; i++)); do "$@" 2>/dev/null && return 0; sleep 0.05; done
  echo "slurm.sh: gave up waiting for: $*" >&2
  return 1
}

all_idle() { [ "$(on "$head" sinfo -h -o '%T %D')" = "idle ${#workers[@]}" ]; }

no_jobs() { [ -z "$(on "$head" squeue -h)" ]; }

# The daemons write their own process ids, which are ids inside their host.
# shellcheck disable=SC2016  # expanded on the host
terminate() { on "$1" bash -c 'for file in /run/slurm/*.pid; do kill "$(cat "$file")"; done'; }

# shellcheck disable=SC2016  # the same
stopped() { on "$1" bash -c 'for file in /run/slurm/*.pid; do ! kill -0 "$(cat "$file")" || exit 1; done'; }

abandon() {
  local status=$?
  logs
  down
  exit "$status"
}

up() {
  local name
  (umask 077 && head -c 1024 /dev/urandom > "$etc/munge/munge.key")
  sed "s/@HEAD@/$head/; s/@NODES@/$(IFS=,; echo "${workers[*]}")/; s#@LOGS@#$run#" "$here/slurm.conf.in" \
    > "$etc/slurm/slurm.conf"
  printf '%s\n' "${HC_SLURM_EXTRA:-}" >> "$etc/slurm/slurm.conf"
  echo CgroupPlugin=cgroup/v1 > "$etc/slurm/cgroup.conf"       # never used, but slurmd wants to find one
  trap abandon EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM

  for name in "${nodes[@]}"; do
    on "$name" mkdir -p /run/munge /run/slurm
    on "$name" /usr/sbin/munged --force --num-threads=2 --pid-file=/run/slurm/munged.pid \
      --log-file="$run/$name.munged.log" --seed-file=/run/slurm/munged.seed >> "$run/$name.munged.log" 2>&1
  done
  on "$head" /usr/sbin/slurmctld -c >> "$run/slurmctld.log" 2>&1
  for name in "${workers[@]}"; do on "$name" /usr/sbin/slurmd -c >> "$run/$name.slurmd.log" 2>&1; done
  wait_for all_idle
  trap - EXIT INT TERM
}

down() {
  local name
  # A job whose slurmd is gone would go on running.
  if on "$head" timeout 5 scancel --user=root 2>/dev/null; then wait_for no_jobs || true; fi
  for name in "${nodes[@]}"; do terminate "$name" 2>/dev/null || true; done
  for name in "${nodes[@]}"; do
    on "$name" true 2>/dev/null || continue       # a host that is down has nothing left to stop
    wait_for stopped "$name"
    on "$name" rm -rf /run/munge /run/slurm
  done
  rm -f "$etc/munge/munge.key" "$etc"/slurm/*
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *) echo "usage: slurm.sh up|down" >&2; exit 2 ;;
esac
