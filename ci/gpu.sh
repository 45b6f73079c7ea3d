#!/usr/bin/env bash
# Builds in place, and runs what needs a GPU: tests, sanitizers, benchmarks. Takes at most 8
# minutes: every step has its limit, and the next one runs even if a step fails or takes too long.
# Prints a table last; exits with 1 if a step has failed, 2 without a GPU.
#
#     bash ci/gpu.sh [folder]
#
# Writes JSON, and the logs of failed steps, into the folder (bench/results/).
set -euo pipefail
folder=$(realpath -m "${1:-"$(dirname "$0")/../bench/results"}")
cd "$(dirname "$0")/.."
mkdir -p "$folder"
logs=$(mktemp -d)
running=
end() { # kills the running step and all its processes
    if [[ -n $running ]]; then kill -KILL -- "-$running" 2>/dev/null || true; fi
    running=
}
trap 'end; rm -rf "$logs"' EXIT
trap 'exit 130' INT TERM
# Tests this tree, even if fastcomm is installed.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# The tree's own virtual environment where there is one, else what the machine offers.
if [ -x .venv/bin/python3 ]; then PATH=$PWD/.venv/bin:$PATH; fi
if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>"$logs/torch"; then
    echo "ci/gpu.sh needs a GPU, and torch finds none here. $(tail -n 1 "$logs/torch")" >&2
    exit 2
fi

deadline=$((SECONDS + 480))
table=()
status=0

# Runs the command in a session of its own, and ends the whole session when the time is up.
step() { # <name> <seconds> <command ...>
    local name=$1 limit=$2 outcome=passed start=$SECONDS left=$((deadline - SECONDS))
    shift 2
    if ((left < limit)); then limit=$left; fi
    echo "== $name: $*"
    : >"$logs/$name"
    if ((limit > 0)); then
        setsid --wait timeout --kill-after=5 "$limit" "$@" >"$logs/$name" 2>&1 &
        running=$!
        wait "$running" || outcome="failed ($?)"
        end
        if [[ $outcome =~ ^failed\ \((124|137)\)$ ]]; then outcome="over $limit s"; fi
    else
        outcome="no time left"
    fi
    tail -n 40 "$logs/$name"
    if [[ $outcome != passed ]]; then
        status=1
        cp "$logs/$name" "$folder/gpu-$name.log"
    fi
    local headline
    headline=$(tail -n 1 "$logs/$name" | cut -c 1-100)
    table+=("$(printf '%-10s %-14s %4d s  %s' \
        "$name" "$outcome" $((SECONDS - start)) "$headline")")
}

# pyproject.toml's options for pytest need plugins that may be missing here.
pytest=(python3 -m pytest -q -o addopts= -p no:cacheprovider -W ignore::pytest.PytestConfigWarning)
# Collectives between ranks that share a card take milliseconds each, and new ranks take seconds. So
# only the reducer's tests with two ranks and one kind of bucket run here; not those with hundreds
# of steps or thousands of broadcasts, nor those that use up their ranks (test_failed_steps.py).
reducer_files=(tests/reducer/test_{backward,autograd,buckets,models,training}.py)
reducer='nccl and 2 and not 3 and not 4 and not many and not thousand'

# The limits add up to the 480 seconds above.
# setup.py alone builds one extension after the other; with --parallel Cython would run in threads,
# which it does not support.
step build 90 bash -e -c '
    python3 -m Cython.Build.Cythonize --quiet -j 8 fastcomm/*.pyx fastcomm/*/*.pyx
    python3 setup.py --quiet build_ext --inplace --parallel 8'
step tests 80 "${pytest[@]}" tests/gpu
step reducer 115 "${pytest[@]}" "${reducer_files[@]}" -k "$reducer"
for tool in memcheck racecheck; do
    if command -v compute-sanitizer >/dev/null; then
        step "$tool" 40 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            python3 tests/gpu/launch_kernels.py
    else
        table+=("$(printf '%-10s not run: there is no compute-sanitizer here' "$tool")")
    fi
done
step flatten 45 python3 bench/flatten.py --rounds 5 --json "$folder/flatten.json"
step allreduce 25 python3 bench/allreduce.py --device cuda -b 1K -e 64M -f 16 -n 100 \
    --json "$folder/allreduce-cuda.json"
step step 45 python3 bench/step.py --device cuda --rounds 6 --json "$folder/step-cuda.json"

# The last line that each step printed: the benchmarks end with their headline.
echo
printf '%s\n' "${table[@]}"
exit "$status"
