#!/usr/bin/env bash
# Looks for tests whose outcome depends on which rank is first, on how fast a core is, or on what
# ran before: runs them on one core, beside load, with one rank late, in random order, many times.
# Ends with 1, and names the runs, if one has failed.
#
#     bash ci/flaky.sh          the tests that depend on order most: some ten minutes on two cores
#     bash ci/flaky.sh --long   the whole suite each time, and every rank late by 1, 10 and 50 ms:
#                               hours
#
# PYTHON: with which interpreter. LOGS: where the runs' output goes.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
logs=${LOGS:-build/flaky}
mkdir -p "$logs"
failed=()
trap 'jobs -p | xargs -r kill 2>/dev/null' EXIT # the busy loops, if this is interrupted

# run NAME COMMAND ...: its output goes to a log, its last line to the terminal.
run() {
    local name=$1
    shift
    "$@" >"$logs/$name.log" 2>&1 || failed+=("$name")
    printf '%-34s %s\n' "$name" "$(tail -n 1 "$logs/$name.log")"
}

suite() { # EXTRA ARGUMENTS ...
    "$python" -m pytest --quiet --numprocesses 4 --no-loadscope-reorder "$@"
}

busy() { # what `suite` says beside four processes that never wait
    local pids=() status
    for _ in 1 2 3 4; do
        while :; do :; done &
        pids+=($!)
    done
    suite "$@"
    status=$?
    kill "${pids[@]}"
    wait "${pids[@]}" 2>/dev/null
    return "$status"
}

late() { # RANK:MS, ARGUMENTS ...
    FASTCOMM_TESTS_DELAY=$1 suite "${@:2}"
}

one_core() {
    taskset -c 0 "$python" -m pytest --quiet --numprocesses 2 --no-loadscope-reorder "$@"
}

# What ends rounds, communicators and processes out of turn.
endings=(
    tests/contract/test_{abandon,ending,forks,late_ranks,lost_peers}.py
    tests/reducer/test_{autograd,disagreement,failed_steps,interrupts,lifetimes}.py
    tests/transports/nccl/test_{abandon,ending,lost_peers}.py
    tests/transports/shm/test_{abandon,deadlines,interrupts,lost_peers}.py
    tests/transports/group/test_{ending,interrupts}.py
    tests/backend/test_{faults,lost_processes}.py
)

if [ "${1:-}" = --long ]; then
    tests=(tests) delays=(1 10 50) ranks=(0 1 2) repeats=20
else
    tests=("${endings[@]}") delays=(50) ranks=(0 1) repeats=2
fi

run one-core one_core "${tests[@]}"
run busy busy "${tests[@]}"
for rank in "${ranks[@]}"; do
    for ms in "${delays[@]}"; do
        run "rank-$rank-late-by-$ms-ms" late "$rank:$ms" "${tests[@]}"
    done
done
run random-order suite --random-order "${tests[@]}"
for i in $(seq "$repeats"); do
    run "again-$i" suite --random-order "${endings[@]}"
done

if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed, with logs in $logs: ${failed[*]}"
    exit 1
fi
