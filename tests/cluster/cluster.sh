#!/bin/bash
# cluster.sh up|down|status: several "hosts" on one machine, each with its own network, host name, processes,
# /tmp, /run, /dev/shm and an sshd, as close to separate machines as one kernel allows.
#
#   HCROOT    scratch folder of this cluster, under the temporary directory; all hosts see it at the same path
#   HC_NODES  names of the hosts, the first is the head node (default: head nodea nodeb)
#   HC_SHOW   colon-separated folders that hosts must see although they lie below a private folder such as /tmp
#
# No namespace gets a name and nothing outside HCROOT is written, so clusters of several test sessions never meet.
# A host lives exactly as long as its process 1 (sshd): ending that one ends all its processes, its mounts and links.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${HCROOT:?set HCROOT to a scratch folder under the temporary directory}
run=$root/run
read -ra nodes <<< "${HC_NODES:-$(cat "$run/nodes" 2>/dev/null || echo head nodea nodeb)}"

fail() { echo "cluster.sh: $*" >&2; exit 1; }

logs() { find "$run" -name '*.log' -size +0 -exec tail -v -n 5 {} + >&2 || true; }

# Start time of a live process, nothing for one that is gone or a zombie. With the id it names a process for good:
# ids are used again, so a record from a crashed run must never be taken at its word.
started() {
  local stat
  read -r stat 2>/dev/null < "/proc/$1/stat" || return 0
  read -ra stat <<< "${stat##*) }"        # the name before it may hold spaces and brackets
  [ "${stat[0]}" = Z ] || echo "${stat[19]}"
}

record() { echo "$1 $(started "$1")" >> "$run/pids"; }

wait_for() {
  local i
  for ((i = 0; i < 200; i++)); do "$@" 2>/dev/null && return 0; sleep 0.05; done
  fail "gave up waiting for: $*"
}

ended() { local pid; for pid; do [ -z "$(started "$pid")" ] || return 1; done; }

answers() { "$here/on" "$1" bash -c 'exec 3<>/dev/tcp/127.0.0.1/22'; }

in_net() { nsenter --target "$1" --net "${@:2}"; }

# Hide a folder behind an empty one of the host's own, and keep HCROOT and HC_SHOW visible at their paths.
# With -n, here and below, mount leaves the list of mounts in the machine's /run alone.
private() {
  local folder=$1 mode=$2 stage=$run/stage keep path
  mount -n -t tmpfs -o "mode=$mode" tmpfs "$stage"
  IFS=: read -ra keep <<< "$root:${HC_SHOW:-}"
  for path in "${keep[@]}"; do
    [[ $path == "$folder"/* ]] || continue
    mkdir -p "$stage/${path#"$folder"/}"
    mount -n --bind "$path" "$stage/${path#"$folder"/}"
  done
  mount -n --move "$stage" "$folder"
}

# Runs as process 1 of the new host.
boot_host() {
  local name=$1 pid file
  read -r pid _ < /proc/self/stat          # still the machine's /proc: this process as seen from outside
  mount -n -t proc proc /proc
  echo "$name" > /proc/sys/kernel/hostname
  private /tmp 1777                        # Slurm's PMIx and Open MPI keep sockets there, by fixed names
  private /dev/shm 1777                    # two hosts have processes of the same id: their segments must not meet
  private /run 755
  mkdir /run/sshd                          # sshd will not start without it
  for file in hosts ssh; do mount -n --bind "$root/etc/$file" "/etc/$file"; done
  for file in slurm munge; do [ ! -d "/etc/$file" ] || mount -n --bind "$root/etc/$file" "/etc/$file"; done
  echo "$name" > "$run/$name.hostname"
  [ ! -e /etc/hostname ] || mount -n --bind "$run/$name.hostname" /etc/hostname
  # Programs tell machines apart by these two.
  file=/proc/sys/kernel/random/boot_id
  cat /proc/sys/kernel/random/uuid > "$run/$name.boot_id"
  mount -n --bind "$run/$name.boot_id" "$file"
  tr -d - < /proc/sys/kernel/random/uuid > "$run/$name.machine-id"
  [ ! -e /etc/machine-id ] || mount -n --bind "$run/$name.machine-id" /etc/machine-id
  echo "$pid" > "$run/$name.pid.new"
  mv "$run/$name.pid.new" "$run/$name.pid"
  cd /
  exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /usr/sbin/sshd -D -E "$run/$name.sshd.log"
}

# The bridge that all hosts are plugged into, in a network of its own: the machine gets no interface and no route.
boot_switch() {
  ip link add br0 type bridge
  ip link set br0 up
  touch "$run/switch.ready"
  exec sleep infinity
}

write_etc() {
  local etc=$root/etc i
  mkdir -p "$etc/ssh" "$etc/slurm" "$etc/munge"
  chmod 700 "$etc/munge"
  {
    echo "127.0.0.1 localhost"
    for i in "${!nodes[@]}"; do echo "10.77.0.$((10 + i)) ${nodes[i]} ${nodes[i]}.cluster.test"; done
  } > "$etc/hosts"
  ssh-keygen -q -t ed25519 -N '' -f "$etc/ssh/key"
  ssh-keygen -q -t ed25519 -N '' -f "$etc/ssh/host"
  cat > "$etc/ssh/ssh_config" <<-END
	Host *
	  IdentityFile /etc/ssh/key
	  BatchMode yes
	  ConnectTimeout 10
	  StrictHostKeyChecking no
	  UserKnownHostsFile /dev/null
	  LogLevel ERROR
	END
  cat > "$etc/ssh/sshd_config" <<-END
	HostKey /etc/ssh/host
	AuthorizedKeysFile /etc/ssh/key.pub
	PermitRootLogin prohibit-password
	PasswordAuthentication no
	StrictModes no
	UsePAM no
	PidFile none
	MaxStartups 100
	END
}

# Half a cluster is none.
abandon() {
  local status=$?
  logs
  down
  exit "$status"
}

up() {
  local i name switch pid
  [ ! -e "$run/pids" ] || fail "$root already has a cluster: take it down first"
  mkdir -p "$run/stage"
  echo "${nodes[*]}" > "$run/nodes"
  trap abandon EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  write_etc

  # A session of their own (setsid) keeps the terminal's Ctrl-C from ending the hosts under a running test.
  setsid unshare --net -- "$here/cluster.sh" boot-switch < /dev/null > "$run/switch.log" 2>&1 &
  switch=$!
  record $switch
  wait_for test -e "$run/switch.ready"

  for i in "${!nodes[@]}"; do
    name=${nodes[i]}
    setsid unshare --net --uts --ipc --mount --pid --fork --kill-child -- "$here/cluster.sh" boot-host "$name" \
      < /dev/null > "$run/$name.log" 2>&1 &
    record $!
  done
  for i in "${!nodes[@]}"; do
    name=${nodes[i]}
    wait_for test -s "$run/$name.pid"
    pid=$(cat "$run/$name.pid")
    record "$pid"
    in_net $switch ip link add "port$i" type veth peer name eth0 netns "$pid"
    in_net $switch ip link set "port$i" master br0 up
    in_net "$pid" ip addr add "10.77.0.$((10 + i))/24" dev eth0
    in_net "$pid" ip link set eth0 up
    in_net "$pid" ip link set lo up
  done
  for name in "${nodes[@]}"; do wait_for answers "$name"; done
  trap - EXIT INT TERM
}

down() {
  local pid start pids=()
  [ -e "$run/pids" ] || return 0
  while read -r pid start; do
    if [ -n "$start" ] && [ "$(started "$pid")" = "$start" ]; then
      kill -KILL "$pid" 2>/dev/null || true
      pids+=("$pid")
    fi
  done < "$run/pids"
  wait_for ended "${pids[@]}"
  rm -rf "$run"/{pids,nodes,switch.ready,*.pid} "${root:?}/etc"      # the logs stay: a failed test may want them
}

status() {
  local name pid
  for name in "${nodes[@]}"; do
    pid=$(cat "$run/$name.pid" 2>/dev/null) || pid=
    if [ -n "$pid" ] && [ -n "$(started "$pid")" ]; then echo "$name up, process $pid"; else echo "$name down"; fi
  done
}

case ${1:-} in
  up) up ;;
  down) down ;;
  status) status ;;
  boot-host) boot_host "$2" ;;
  boot-switch) boot_switch ;;
  *) echo "usage: cluster.sh up|down|status" >&2; exit 2 ;;
esac
