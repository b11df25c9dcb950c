#!/usr/bin/env bash
# A Slurm of this machine alone for `make test-slurm`: munged, slurmctld and one slurmd per node, without systemd.
#
#   cluster.sh install             install the packages (Debian or Ubuntu, as root); no daemon is started by apt
#   cluster.sh serve DIR NODES     run it in the foreground with its state under DIR, as the first process of namespaces
#                                  of its own (below); ends with all that it started when it is killed
#   cluster.sh in DIR COMMAND ...  run a command beside it: sbatch, squeue, scancel ...
#
# serve is started by `unshare --mount --net --pid --ipc --uts --fork --kill-child --mount-proc`, so that no port, file of /etc, /run, /tmp
# or /dev/shm, and no process of the machine is touched, and nothing is left behind. The nodes are n1, n2, ...
set -euo pipefail

source "$(dirname "$0")/../debian.sh"

PACKAGES=(slurm-wlm munge)
ADDRESS=10.77.0.1

fetch_packages() {
    if type -P slurmctld slurmd munged sbatch >/dev/null; then return; fi
    install_packages "${PACKAGES[@]}"
}

own_places() {  # DIR: what a Slurm writes outside its state, and what names its nodes, is seen in here only
    mount --make-rprivate /
    mkdir -p "$1"/{state,log,spool,munge,tmp,checkout}
    chmod 1777 "$1/tmp"
    local checkout
    checkout=$(cd "$(dirname "$0")/../../.." && pwd)
    mount --bind "$checkout" "$1/checkout"
    mount -t tmpfs -o size=1g,mode=1777 shm /dev/shm
    mount -t tmpfs -o mode=755 run /run
    mount --bind "$1/tmp" /tmp
    if [ ! -e "$checkout" ]; then  # it lies in the /tmp that is hidden now
        mkdir -p "$checkout"
        mount --bind "$1/checkout" "$checkout"
    fi
    hostname n1
    ip link set lo up
    ip link add eth0 type veth peer name eth1  # an address that is not loopback: names are not resolved without one
    ip address add "$ADDRESS/24" dev eth0
    ip link set eth0 up
    ip link set eth1 up
    printf '127.0.0.1 localhost\n%s%s\n' "$ADDRESS" "$(printf ' n%d' $(seq "$2"))" > "$1/hosts"
    mount --bind "$1/hosts" /etc/hosts
}

authentication() {  # DIR
    chmod 755 "$1"
    dd if=/dev/urandom of="$1/munge/key" bs=1k count=1 status=none
    chown -R munge: "$1/munge"
    chmod 700 "$1/munge"; chmod 400 "$1/munge/key"
    install -d -o munge -g munge -m 755 /run/munge
    runuser -u munge -- munged --force --key-file "$1/munge/key" --log-file "$1/munge/log" \
        --pid-file "$1/munge/pid" --seed-file "$1/munge/seed"
}

configuration() {  # DIR NODES
    cat <<CONF
ClusterName=one
SlurmctldHost=n1($ADDRESS)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10  # so long a requeued job is held back; Slurm's default is 120
CredType=cred/munge
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool/%n
SlurmctldPidFile=$1/slurmctld.pid
SlurmdPidFile=$1/slurmd.%n.pid
SlurmctldLogFile=$1/log/slurmctld
SlurmdLogFile=$1/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=30
MessageTimeout=60
GresTypes=gpu
SlurmdParameters=config_overrides
CONF
    for node in $(seq "$2"); do
        # (config_overrides: as many processors as are named, whatever the machine has)
        echo "NodeName=n$node NodeHostname=n1 NodeAddr=$ADDRESS Port=$((17000 + node)) CPUs=8 Gres=gpu:2 State=UNKNOWN"
    done
    echo "PartitionName=all Nodes=n[1-$2] Default=YES MaxTime=INFINITE State=UP"
}

serve() {  # DIR NODES
    own_places "$1" "$2"
    authentication "$1"
    configuration "$1" "$2" > "$1/slurm.conf"
    printf 'Name=gpu File=/dev/%s\n' null zero > "$1/gres.conf"  # any two devices: they are counted, not opened
    slurmctld -f "$1/slurm.conf"
    for node in $(seq "$2"); do slurmd -f "$1/slurm.conf" -N "n$node" -c; done
    touch "$1/serving"
    exec sleep infinity
}

within() {  # DIR COMMAND ...
    local dir=$1 first
    shift
    first=$(cat "$dir/first")
    SLURM_CONF=$dir/slurm.conf exec nsenter --target "$first" --mount --net --pid --ipc --uts --wd="$PWD" "$@"
}

case ${1:-} in
install) fetch_packages ;;
serve) serve "$2" "$3" ;;
in) shift; within "$@" ;;
*) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
