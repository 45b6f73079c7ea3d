#!/usr/bin/env bash
# The tests that use NVIDIA's own NCCL, as far as it goes without a GPU, with several versions of
# it: symbols, versions, unique ids, what a failing call says. Keeps each wheel in build/nccl/
# for the next time (some 400 MB each). Exits with 1 if a version has failed.
#
#     bash ci/nccl_versions.sh [wheel ...]
#
# torch 2.6 brought 2.21.5, torch 2.11 brings 2.28.9. From 2.31 on a destruction waits for the host's
# ranks, and NCCL_ALGO turns off the collectives that it does not name.
set -euo pipefail
cd "$(dirname "$0")/.."
(($#)) || set -- nvidia-nccl-cu12==2.21.5 nvidia-nccl-cu13=={2.28.9,2.31.2,2.32.3}
python=.venv/bin/python
table=()
status=0

for wheel in "$@"; do
    folder=$PWD/build/nccl/$wheel
    library=$folder/nvidia/nccl/lib/libnccl.so.2
    if [ ! -e "$library" ]; then
        rm -rf "$folder"
        $python -m pip --disable-pip-version-check download --quiet --no-deps \
            --dest "$folder" "$wheel"
        $python -m zipfile --extract "$folder"/*.whl "$folder"
        rm "$folder"/*.whl
    fi
    outcome=passed
    tests=tests/transports/nccl/test_library.py
    printed=$(FASTCOMM_TEST_NCCL=$library $python -m pytest -q $tests -k real) || outcome=FAILED
    [ "$outcome" = passed ] || { status=1; echo "$printed"; }
    table+=("$(printf '%-28s %s  %s' "$wheel" "$outcome" "$(tail -n 1 <<<"$printed")")")
done
printf '%s\n' "${table[@]}"
exit "$status"
