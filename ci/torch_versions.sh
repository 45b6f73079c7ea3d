#!/usr/bin/env bash
# The tests under several versions of torch, each in an environment of its own under build/, which
# stays there for the next time (some 6 GB each for a CUDA build). Prints what passed; exits with 1
# if a version has failed.
#
#     bash ci/torch_versions.sh [version ...]
#
# The oldest version that pyproject.toml promises comes first. The last is the newest that pip finds
# here, up to TESTED.
set -euo pipefail
cd "$(dirname "$0")/.."
TESTED=2.15
folder=build/torch-versions
mkdir -p "$folder"
table=()
status=0

newest() { # of the versions up to the tested one
    python3 -m pip install --quiet --dry-run --ignore-installed --no-deps --report - \
        "torch<=$TESTED.99" | python3 -c '
import json, sys
print(json.load(sys.stdin)["install"][0]["metadata"]["version"])'
}
if ((!$#)); then
    last=$(newest)
    echo "the newest torch that pip installs here, of those that fastcomm is tested with: $last"
    set -- 2.7.0 2.11.0 2.13.0 "$last"
fi

for version in "$@"; do
    environment=$folder/$version
    log=$environment.log
    # These are pinned for one torch; the others bring, or limit, their own.
    constraints=$(grep -vE '^(torch|nvidia-nccl|nvidia-cuda-nvrtc|setuptools)\b' ci/constraints.txt)
    constraints+=$'\n'torch==$version
    if [ "$constraints" != "$(cat "$environment.txt" 2>/dev/null)" ]; then
        echo "$constraints" >"$environment.txt" # newer than what is installed, which is made anew
    fi
    echo "== torch $version; log: $log"
    outcome=passed
    make test-all VENV="$environment" CONSTRAINTS="$environment.txt" >"$log" 2>&1 || outcome=FAILED
    [ "$outcome" = passed ] || status=1
    build=$("$environment/bin/python" -c 'import torch; print(torch.__version__)' || echo none)
    counts=$(grep -E '(passed|failed|error).* in [0-9.]+s' "$log" | tail -n 1 | tr -d = || true)
    table+=("$(printf '%-8s %-16s %s %s' "$version" "${build#"$version"}" "$outcome" "$counts")")
done
printf '%s\n' '' "version  build            outcome" "${table[@]}"
exit "$status"
