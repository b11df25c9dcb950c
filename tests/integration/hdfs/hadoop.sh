#!/usr/bin/env bash
# What `make test-hdfs` needs of Hadoop: a NameNode and a DataNode 2.7.3, out of the one package that carries them.
#
#   hadoop.sh install DIR     put the Java archives into DIR (220 MB are fetched once), install Java and Jersey by apt (root)
#
# The Python package pyspark 2.4.8 has Hadoop's jars, and all that they need but Jersey 1, which Debian and Ubuntu have.
# tests/support/hdfs.py configures, starts and kills the servers. Elsewhere the tests are skipped where something is missing.
set -euo pipefail

source "$(dirname "$0")/../debian.sh"

ARCHIVE=pyspark-2.4.8.tar.gz
SHA256=3a19b71b8dc8dd91ebc943604a05e1ab01bce052456d42937035632d852d78dc
JARS=(
    hadoop-{hdfs,common,auth,annotations}-2.7.3 jetty-{,util-}6.1.26 netty-3.9.9.Final netty-all-4.1.47.Final
    commons-{cli-1.2,codec-1.10,collections-3.2.2,configuration-1.6,io-2.4,lang-2.6,logging-1.1.3} guava-14.0.1
    protobuf-java-2.5.0 htrace-core-3.1.0-incubating jackson-{core,mapper}-asl-1.9.13 javax.servlet-api-3.1.0
    leveldbjni-all-1.8 log4j-1.2.17 slf4j-{api,log4j12}-1.7.16 xercesImpl-2.9.1 httpclient-4.5.6 httpcore-4.4.10
    jaxb-api-2.2.2 activation-1.1.1
)
JERSEY=(jersey1-core jersey1-server jersey1-servlet jsr311-api asm)

fetch() {  # DIR
    if [ -e "$1/complete" ]; then return; fi
    rm -rf "$1"
    mkdir -p "$1"
    if ! "${PYTHON:-python3}" "$(dirname "$0")/fetch_archive.py" "$ARCHIVE" "$1/pyspark.tar.gz"; then
        echo "hadoop.sh: $ARCHIVE cannot be fetched from the package index: the tests will be skipped"
        return
    fi
    echo "$SHA256  $1/pyspark.tar.gz" | sha256sum --check --quiet
    tar -xzf "$1/pyspark.tar.gz" -C "$1" --strip-components=3 $(printf 'pyspark-2.4.8/deps/jars/%s.jar ' "${JARS[@]}")
    rm "$1/pyspark.tar.gz"
    touch "$1/complete"
}

install() {  # DIR
    local packages=() name
    compgen -G "/usr/lib/jvm/java-1[17]-*/bin/java" > /dev/null || compgen -G "/usr/lib/jvm/java-21-*/bin/java" > /dev/null || \
        packages+=(default-jre-headless)
    for name in "${JERSEY[@]}"; do
        [ -e "/usr/share/java/$name.jar" ] || { packages+=(libjersey1-{core,server,servlet}-java libasm-java); break; }
    done
    if [ "${#packages[@]}" != 0 ]; then
        install_packages "${packages[@]}"
    fi
    fetch "$1"
    for name in "${JERSEY[@]}"; do ln -sf "/usr/share/java/$name.jar" "$1/$name.jar"; done
}

case "${1:-}" in
    install) install "$2" ;;
    *) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac
