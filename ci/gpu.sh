#!/usr/bin/env bash
# Builds in place, and runs what needs a GPU: tests, the examples of the documents, sanitizers,
# benchmarks. Takes at most 9 minutes: every step has its limit, and the next one runs even if a
# step fails or takes too long.
# What is quick and tells most comes first: a run that is cut short has said most. Prints a table
# last; exits with 1 if a step has failed, 2 without a GPU.
#
#     bash ci/gpu.sh [folder]
#     PYTHON=python3.12 bash ci/gpu.sh     another interpreter than that of .venv
#
# Writes at most five files into the folder (bench/results/): JSON, as far as each benchmark has
# come, and the ends of the logs of failed steps in gpu-failures.log. gpu-summary.json says what ran
# on which GPU; `python bench/gpu_report.py bench/results` makes rows for the documents of it.
# Prints at most 10,000 characters.
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
finish() { # also of a run that is cut short
    end
    if [[ -e $logs/steps ]]; then
        "$python" bench/gpu_report.py "$folder" --steps "$logs/steps" >/dev/null || true
    fi
    rm -rf "$logs"
}
trap finish EXIT
trap 'exit 130' INT TERM
# Tests this tree, even if fastcomm is installed.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# Without PYTHON, the tree's own virtual environment where there is one.
python=python3
if [ -x .venv/bin/python3 ]; then python=$PWD/.venv/bin/python3; fi
export python=${PYTHON:-$python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>"$logs/torch"; then
    echo "ci/gpu.sh needs a GPU, and torch finds none here. $(tail -n 1 "$logs/torch")" >&2
    exit 2
fi

deadline=$((SECONDS + 540))
# No figure of an earlier run may pass for one of this run.
rm -f "$folder"/{gpu-summary,flatten,allreduce-cuda,step-cuda}.json
rm -f "$folder"/gpu-*.log
table=()
status=0
room=2400 # characters of failed steps that are printed beside those of any step

# Runs the command in a session of its own, and ends the whole session when the time is up.
step() { # <name> <seconds> <command ...>
    local name=$1 limit=$2 outcome=passed start=$SECONDS left=$((deadline - SECONDS))
    shift 2
    if ((left < limit)); then limit=$left; fi
    cut -c 1-90 <<<"== $name: $*"
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
    local shown=400
    if [[ $outcome != passed ]]; then
        status=1
        shown=$((shown + (room > 1600 ? 1600 : room)))
        room=$((room > 1600 ? room - 1600 : 0))
        { echo "== $name: $outcome" && tail -n 150 "$logs/$name"; } >>"$folder/gpu-failures.log"
    fi
    tail -c "$shown" "$logs/$name"
    local headline
    headline=$(tail -n 1 "$logs/$name" | sed 's/^=* //; s/ =*$//' | tr '\t|' '  ' | cut -c 1-90)
    table+=("$(printf '%-10s %-14s %4d s  %s' \
        "$name" "$outcome" $((SECONDS - start)) "$headline")")
    printf '%s\t%s\t%d\t%s\n' "$name" "$outcome" $((SECONDS - start)) "$headline" >>"$logs/steps"
}

# pyproject.toml's options for pytest need plugins that may be missing here. A test that hangs
# inside CUDA runs no Python that could end it: it is named before it starts, and a thread of
# faulthandler's prints where it is; then the step's limit ends the tests.
pytest=("$python" -m pytest -v -o addopts= -o faulthandler_timeout=60 -p no:cacheprovider
    -W ignore::pytest.PytestConfigWarning)
# Collectives between ranks that share a card take milliseconds each, and new ranks take seconds. So
# only the reducer's tests with two ranks and one kind of bucket run here; not those with hundreds
# of steps or thousands of broadcasts, nor those that use up their ranks (test_failed_steps.py).
reducer_files=(tests/reducer/test_{backward,autograd,buckets,models,training}.py)
reducer='nccl and 2 and not 3 and not 4 and not many and not thousand'

# The limits are for a cold machine, where torch's first import, its first torch.compile and new
# ranks take long. They add up to more than there is: most steps need half of theirs.
# setup.py alone builds one extension after the other; with --parallel Cython would run in threads,
# which it does not support.
step build 150 bash -e -c '
    "$python" -m Cython.Build.Cythonize --quiet -j 8 fastcomm/*/*.pyx fastcomm/*/*/*.pyx
    "$python" setup.py --quiet build_ext --inplace --parallel 8'
step kernels 60 "$python" tests/gpu/launch_kernels.py
step flatten 90 "$python" bench/flatten.py --rounds 5 --json "$folder/flatten.json"
step tests 150 "${pytest[@]}" tests/gpu
step step 120 "$python" bench/step.py --device cuda --models resnet50 bert gpt2 large \
    --rounds 10 --json "$folder/step-cuda.json"
step compiled 120 "$python" bench/compiled.py --device cuda --rounds 8
step allreduce 60 "$python" bench/allreduce.py --device cuda -b 1K -e 64M -f 16 -n 100 \
    --json "$folder/allreduce-cuda.json"
step documents 140 "${pytest[@]}" tests/docs/test_docs.py -k on_any_device
step reducer 150 "${pytest[@]}" "${reducer_files[@]}" -k "$reducer"
for tool in memcheck racecheck; do
    if command -v compute-sanitizer >/dev/null; then
        step "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$python" tests/gpu/launch_kernels.py
    else
        table+=("$(printf '%-10s not run: there is no compute-sanitizer here' "$tool")")
    fi
done

# The last line that each step printed: the benchmarks end with their headline.
echo
printf '%s\n' "${table[@]}"
exit "$status"
