#!/usr/bin/env bash
# All benchmarks of the engine and of storage on a machine where nothing else runs: more than half an hour on 2 cores.
#
#   DLROVER_PYTHON=DIR/bin/python benchmarks/all_quiet.sh             # with DLRover; stall.py --dlrover-setup says how to get it
#   SIZES="0.2" ROUNDS=2 KILLS=2 benchmarks/all_quiet.sh out/bench    # a trial run into another folder
#
# Writes one JSON per program and size, and all tables into tables.md, under benchmarks/results or the folder given.
# The last two programs need root and NODES=1; NODE_GB: GB per node of the first of them (default "0.1 1"), where sizes that do not fit are left out.
# TRAINER="--torchtitan VENV --nanogpt FOLDER": what trainer_speed.py is to be compared with; without it that program is left out.
# SIZES: GB (default "0.2 1.5 4"); ROUNDS: at most so many; KILLS: of torn.py, per system (5); S3_TEST_ENDPOINT: a real server instead of moto's;
# RADOSGW=1 starts one for the run (root, as make test-s3); BIG=1: everything also at 4 ranks of the largest size (+8 minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
python=${PYTHON:-.venv/bin/python}
sizes=${SIZES:-0.2 1.5 4}
rounds=${ROUNDS:-1000}
dlrover=${DLROVER_PYTHON:+--dlrover-python $DLROVER_PYTHON}
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
mkdir -p "$results"
tables=$results/tables.md
began=$SECONDS
failed=0

run() {  # SECONDS_AT_MOST TITLE COMMAND...
    local limit=$1 title=$2 from=$SECONDS
    shift 2
    printf '\n## %s\n\n`%s`\n' "$title" "${*/#$python/python}" | tee -a "$tables"
    if ! timeout -k 200 "$limit" "$@" 2>&1 | tee -a "$tables"; then
        echo "FAILED or cut off after $limit s" | tee -a "$tables"
        failed=1
    fi
    echo "[$((SECONDS - from)) s, $((SECONDS - began)) s in all]"
}

seconds_for() {  # of rounds per configuration; two rounds are taken in any case
    case $1 in 0.*) echo 15 ;; 1*) echo 30 ;; *) echo 1 ;; esac
}

printf '# Tables of %s\n' "$(date -u +%Y-%m-%dT%H:%MZ)" > "$tables"
run 120 "copy of memory" "$python" benchmarks/memory_copy.py --json "$results/memory-copy.json"
run 300 "copy thread" "$python" benchmarks/copy_thread.py --json "$results/copy-thread.json"
# shellcheck disable=SC2086 -- $dlrover is two words or none
for size in $sizes; do
    s=$(seconds_for "$size")
    stall=("$python" benchmarks/stall.py --gb "$size" --seconds "$s" --rounds "$rounds")
    case $size in
        0.* | 1*) run 600 "stall, $size GB" "${stall[@]}" --ranks 1,4 $dlrover --json "$results/stall-$size.json" ;;
        *)
            run 500 "stall, $size GB" "${stall[@]}" --ranks 1 $dlrover --json "$results/stall-$size-1rank.json"
            few=(--methods flashckpt,blocking)
            if [ -n "${BIG:-}" ]; then few=(); fi
            run 600 "stall, $size GB, 4 ranks" "${stall[@]}" --ranks 4 "${few[@]}" --json "$results/stall-$size-4ranks.json"
            ;;
    esac
done
run 600 "end to end" "$python" benchmarks/end_to_end.py --gb "$(echo "$sizes" | tr ' ' ',')" --seconds 40 --rounds "$rounds" --json "$results/end-to-end.json"
run 400 "restore, from the start of a process" "$python" benchmarks/end_to_end.py --restore --gb 1.5 --seconds 60 --rounds "$rounds" --json "$results/end-to-end-restore.json"
for tensors in 1000 20000; do
    run 200 "stall, $tensors tensors" "$python" benchmarks/stall.py --gb 0.25 --tensors $tensors --methods flashckpt,blocking \
        --seconds 8 --rounds "$rounds" --json "$results/stall-${tensors}tensors.json"
done
for size in $sizes; do
    ranks=1,4
    case $size in 0.* | 1*) ;; *) if [ -z "${BIG:-}" ]; then ranks=1; fi ;; esac
    run 500 "persist, $size GB" "$python" benchmarks/persist.py --gb "$size" --ranks $ranks --seconds "$(seconds_for "$size")" \
        --rounds "$rounds" --json "$results/persist-$size.json"
done
uplift=$(echo "$sizes" | tr ' ' '\n' | grep -E '^(0|1)' | paste -sd,)
run 200 "persist, uplift" "$python" benchmarks/persist.py --uplift --gb "$uplift" --seconds 25 --rounds "$rounds" --json "$results/persist-uplift.json"
if [ -n "${RADOSGW:-}" ]; then
    scratch=$(mktemp -d /var/tmp/flashckpt-s3.XXXXXX)
    trap 'tests/integration/s3/radosgw.sh stop $scratch/rgw; rmdir $scratch' EXIT
    export PYTHON=$python
    tests/integration/s3/radosgw.sh install > /dev/null
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    S3_TEST_ENDPOINT=$(tests/integration/s3/radosgw.sh start "$scratch/rgw" "$port")
    export S3_TEST_ENDPOINT
fi
run 300 "persist, S3" "$python" benchmarks/persist.py --s3 --gb "${S3_GB:-0.2}" --seconds 30 --rounds "$rounds" --json "$results/persist-s3.json"
# shellcheck disable=SC2086
run 400 "torn" "$python" benchmarks/torn.py --kills "${KILLS:-5}" $dlrover --json "$results/torn.json"
run 200 "restart, 1 MB" "$python" benchmarks/restart.py --state-mb 1 --runs 2 --kills 3 --json "$results/restart-1mb.json"
run 300 "restart, 1.5 GB" "$python" benchmarks/restart.py --state-mb 1500 --runs 2 --kills 3 --build empty --json "$results/restart-1500mb.json"
run 300 "many tensors" "$python" benchmarks/many_tensors.py --json "$results/many.json"
run 400 "restores of many tensors" "$python" benchmarks/many_tensors_restore.py 100000 --json "$results/many-restore.json"
run 100 "sampler" "$python" benchmarks/sampler.py --json "$results/sampler.json"
if [ -n "${TRAINER:-}" ]; then
    # shellcheck disable=SC2086
    run 900 "the trainer" "$python" benchmarks/trainer_speed.py $TRAINER --json "$results/trainer-speed.json"
fi
if [ -n "${NODES:-}" ]; then  # nodes are network namespaces: root
    run 1500 "a lost node" "$python" benchmarks/node_loss.py --gb ${NODE_GB:-0.1 1} --rounds 3 --json "$results/node-loss.json"
    run 1200 "replication beside steps" "$python" benchmarks/replication.py --json "$results/replication.json"
fi
echo "results and tables.md are in $results; $((SECONDS - began)) s"
exit $failed
