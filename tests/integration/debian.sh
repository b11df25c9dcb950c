# Sourced by the scripts that install servers from Debian's packages.

install_packages() {  # PACKAGE...: as root; no daemon is started by apt
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "${0##*/}: needs root and apt-get to install $*; install them by hand, or run the other tests only (make test)" >&2
        exit 20
    fi
    local ours=""
    if [ ! -e /usr/sbin/policy-rc.d ]; then  # containers often ship one: that one stays as it is
        ours=1
        printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get -o Acquire::http::Timeout=30 -o Acquire::Retries=3 update -q
    apt-get -o Acquire::http::Timeout=30 -o Acquire::Retries=3 install -y -q --no-install-recommends "$@"
    if [ -n "$ours" ]; then rm -f /usr/sbin/policy-rc.d; trap - EXIT; fi
}
