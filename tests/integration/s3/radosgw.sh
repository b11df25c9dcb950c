#!/usr/bin/env bash
# A real S3 server on this machine for `make test-s3`: one Ceph monitor, one OSD on a sparse file, one radosgw.
#
#   radosgw.sh install           install the packages (Debian or Ubuntu, as root); no daemon is started by apt
#   radosgw.sh start DIR PORT    start it with its state under DIR (must not exist); prints the endpoint
#   radosgw.sh stop DIR          end it and remove DIR
#
# Access key "test", secret "testtest". Comes up in 15 to 50 s; its first request creates pools (2 s more).
set -euo pipefail

source "$(dirname "$0")/../debian.sh"

PACKAGES=(radosgw ceph-mon ceph-osd ceph-common)

need_root() {
    if [ "$(id -u)" != 0 ]; then
        echo "radosgw.sh: must run as root, is $(id -un): use sudo, or run the other tests only (make test)" >&2
        exit 20
    fi
}

install() {
    if type -P radosgw ceph-mon ceph-osd ceph radosgw-admin >/dev/null; then return; fi
    install_packages "${PACKAGES[@]}"
}

configuration() {  # DIR PORT MON_PORT FSID
    cat <<CONF
[global]
fsid = $4
mon host = [v1:127.0.0.1:$3]
auth cluster required = none
auth service required = none
auth client required = none
ms bind ipv4 = true
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd pool default pgp num = 8
mon allow pool size one = true
mon data = $1/mon
mon data avail crit = 1
mon data avail warn = 1
osd data = $1/osd
osd objectstore = bluestore
bluestore block size = 21474836480
bluestore cache size = 268435456
osd memory target = 1073741824
osd op num shards = 2
osd class update on start = false
run dir = $1/run
admin socket = $1/run/\$name.asok
log file = $1/\$name.log
rgw frontends = beast endpoint=127.0.0.1:$2
rgw data = $1/rgw
rgw dns name = localhost
rgw thread pool size = 64
rgw enable usage log = false
keyring = /dev/null
CONF
}

free_port() { "${PYTHON:-python3}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

answers() { "${PYTHON:-python3}" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)' "$1" 2>/dev/null; }

start() {
    local dir=$1 port=$2 fsid uuid mon_port
    need_root
    if [ -e "$dir" ]; then echo "radosgw.sh: $dir exists; name a new directory" >&2; exit 20; fi
    mkdir -p "$dir"/{mon,osd,rgw,run}
    trap 'echo "radosgw.sh: start failed at: $BASH_COMMAND" >&2; tail -n 20 "$dir"/setup.out "$dir"/*.log >&2' ERR
    fsid=$(cat /proc/sys/kernel/random/uuid) uuid=$(cat /proc/sys/kernel/random/uuid) mon_port=$(free_port)
    configuration "$dir" "$port" "$mon_port" "$fsid" > "$dir/ceph.conf"
    local conf=(-c "$dir/ceph.conf")
    export CEPH_CONF="$dir/ceph.conf"
    monmaptool --create --clobber --fsid "$fsid" --addv a "[v1:127.0.0.1:$mon_port]" "$dir/monmap" > /dev/null
    ceph-mon "${conf[@]}" -i a --mkfs --monmap "$dir/monmap" > "$dir/setup.out" 2>&1
    ceph-mon "${conf[@]}" -i a --pid-file "$dir/mon.pid"
    timeout 120 ceph "${conf[@]}" osd new "$uuid" 0 > /dev/null
    ceph-osd "${conf[@]}" -i 0 --mkfs --osd-uuid "$uuid" >> "$dir/setup.out" 2>&1
    # an OSD that asks the monitor before it has the cluster's id is refused ("wrong fsid") and ends: start it again
    for attempt in 1 2 3 4 5; do
        if ceph-osd "${conf[@]}" -i 0 --pid-file "$dir/osd.pid" >> "$dir/setup.out" 2>&1; then break; fi
        [ "$attempt" != 5 ] || { echo "radosgw.sh: the OSD did not start" >&2; tail -n 20 "$dir/setup.out" >&2; exit 1; }
        sleep 1
    done
    timeout 120 ceph "${conf[@]}" osd crush add osd.0 1.0 host=h root=default >> "$dir/setup.out" 2>&1 || true
    timeout 120 ceph "${conf[@]}" osd crush rule create-simple flat default osd >> "$dir/setup.out" 2>&1 || true
    timeout 180 radosgw-admin "${conf[@]}" user create --uid=t --display-name=t --access-key=test --secret-key=testtest \
        >> "$dir/setup.out" 2>&1
    radosgw "${conf[@]}" -n client.rgw --pid-file "$dir/rgw.pid" >> "$dir/setup.out" 2>&1
    for _ in $(seq 600); do
        if answers "http://127.0.0.1:$port/"; then echo "http://127.0.0.1:$port"; return; fi
        sleep 0.1
    done
    echo "radosgw.sh: no answer on port $port in 60 s; see $dir/*.log" >&2
    exit 1
}

stop() {  # newest first; only what the pid files of DIR name
    local dir=$1 name pid
    for name in rgw osd mon; do
        if pid=$(cat "$dir/$name.pid" 2>/dev/null); then
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 300); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
            kill -9 "$pid" 2>/dev/null || true
        fi
    done
    if [ -e "$dir/ceph.conf" ]; then rm -rf "$dir"; fi
}

case "${1:-}" in
    install) install ;;
    start) start "$2" "$3" ;;
    stop) stop "$2" ;;
    *) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac
