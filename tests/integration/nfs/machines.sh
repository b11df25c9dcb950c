#!/usr/bin/env bash
# The machines of `make test-nfs`: User Mode Linux, a whole kernel that runs as a process, with NFS client and server.
#
#   machines.sh install       install the packages (Debian, as root); no daemon is started by apt
#   machines.sh boot ROLE     the first process of such a machine: "server" exports a disk, "client" mounts nothing yet;
#                             then the agent (agent.py), which does what it is asked on tty1
#
# Elsewhere than on Debian (x86_64) the tests are skipped where the programs are missing.
#
# A machine's root is the one of the host, read-only: it runs the host's Python from the host's checkout, and what it
# writes is in its own memory or on its own disk. tests/support/machines.py starts and kills them.
set -euo pipefail

PACKAGES=(user-mode-linux nfs-kernel-server kmod iproute2 e2fsprogs)
HERE=$(cd "$(dirname "$0")" && pwd)

fetch_packages() {
    if type -P linux.uml exportfs rpc.nfsd modprobe ip mkfs.ext4 >/dev/null; then return; fi
    local system
    system="$(. /etc/os-release && echo "$ID") on $(uname -m)"
    if [ "$system" != "debian on x86_64" ]; then
        echo "machines.sh: user-mode-linux is a package of Debian on x86_64, this is $system: the tests will be skipped"
        return
    fi
    source "$HERE/../debian.sh"
    install_packages "${PACKAGES[@]}"
}

own_places() {
    mount -t proc proc /proc
    mount -t sysfs sys /sys
    mount -t tmpfs -o mode=755 run /run
    mkdir -p /dev/shm /run/tmp /run/home /run/kernel/lib/modules
    mount -t tmpfs shm /dev/shm
    mount --bind /usr/lib/uml/modules /run/kernel/lib/modules
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/home TMPDIR=/run/tmp PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
}

modules() { modprobe -d /run/kernel -a "$@"; }

links() {  # END: link N joins vec0 of client N, 10.0.N.2, and vecN of the server, 10.0.N.1
    local path device
    ip link set lo up
    for path in /sys/class/net/vec*; do
        device=${path##*/}
        ip address add "10.0.$(cut -d: -f5 "$path/address").$1/24" dev "$device"
        ip link set "$device" up
    done
}

serve() {  # the disk outlives the machine: the files, and which clients have locks and opened files to reclaim
    modules nfsd
    mkdir -p /run/disk /run/pipes
    mount -t ext4 /dev/ubda /run/disk
    mkdir -p /run/disk/export /run/disk/state/nfsdcld
    mount --bind /run/disk/state /var/lib/nfs
    touch /var/lib/nfs/{etab,rmtab}
    mount -t rpc_pipefs pipes /run/pipes
    mount -t nfsd nfsd /proc/fs/nfsd
    echo 10 > /proc/fs/nfsd/nfsv4leasetime  # seconds that a started server waits for clients: 90 by default
    echo 10 > /proc/fs/nfsd/nfsv4gracetime
    nfsdcld -p /run/pipes
    rpcbind
    exportfs -o rw,sync,no_root_squash,no_subtree_check,insecure,fsid=0 '*:/run/disk/export'
    rpc.mountd --port 20048
    rpc.nfsd 4
}

boot() {
    own_places
    hostname "$1"
    if [ "$1" = server ]; then
        links 1
        serve
    else
        links 2
        modules nfs nfsv3 nfsv4 sch_ingress cls_matchall act_gact
    fi
    cd "$HERE/../../.."
    PYTHONPATH=$PWD:$PWD/tests exec "$PYTHON" "$HERE/agent.py"
}

case "${1:-}" in
    install) fetch_packages ;;
    boot) boot "$2" ;;
    *) sed -n '2,11p' "$0" >&2; exit 2 ;;
esac
