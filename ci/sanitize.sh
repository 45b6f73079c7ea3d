#!/usr/bin/env bash
#
#     ci/sanitize.sh core                 about a minute on two cores
#     ci/sanitize.sh extensions [quick]   some eight minutes; quick: two
#     ci/sanitize.sh                      both
#
# core: the C core under the sanitizers: ASan and UBSan with ranks as processes and as threads, TSan
# with threads. The CUDA kernels, compiled for the host, under ASan and UBSan lane by lane, and
# whole, in the block emulator, under TSan, too.
#
# extensions: a copy of the tree, in build/sanitized, whose extension modules are compiled with ASan
# and UBSan, but for those of cuda/ and nccl/, which come from this tree: build it first. Runs tests
# there, among them all that send what is damaged. PYTHON names the interpreter. It takes gcc, whose
# runtime can be loaded before Python.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# ifuncs are resolved before the sanitizers have started, so there is one instruction set only.
build() { # <name> <sanitizers>
    "${CC:-gcc}" -std=gnu11 -O2 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra -Werror \
        -DFASTCOMM_NO_CLONES "-fsanitize=$2" -fno-sanitize-recover=all -Ikernels \
        kernels/shm/*.c tests/transports/shm/*.c -lm -pthread -o "$folder/$1"
}

sanitize_core() {
    build asan address,undefined
    build tsan thread
    "$folder/asan" processes quick
    "$folder/asan" threads quick
    # TSan before gcc 14 does not know every address layout, so we ask for the fixed one. A
    # container may refuse; then TSan runs without it.
    fixed_layout=()
    setarch -R true 2>/dev/null && fixed_layout=(setarch -R)
    TSAN_OPTIONS=halt_on_error=1 "${fixed_layout[@]}" "$folder/tsan" threads quick

    # The kernels have many functions, all inlined: optimising them takes longer than it saves.
    "${CXX:-g++}" -x c++ -std=c++17 -O0 -g -fno-omit-frame-pointer -Wall -Wextra -Werror \
        -DFASTCOMM_HOST -fsanitize=address,undefined -fno-sanitize-recover=all \
        -Ikernels -Itests/kernels kernels/cuda/*.cu tests/kernels/driver.cpp -o "$folder/kernels"
    "$folder/kernels"

    # TSan must not look into the emulator, which says itself what orders lanes. ASan warns of
    # swapcontext, since it does not know that the emulator announces every switch.
    emulated=(-std=c++17 -g -fno-omit-frame-pointer -Wall -Wextra -Werror
        -DFASTCOMM_HOST -DFASTCOMM_EMULATED -DFEW_PAIRS -Ikernels -Itests/kernels)
    "${CXX:-g++}" "${emulated[@]}" -O1 -c tests/kernels/emulator.cpp -o "$folder/emulator.o"
    build_frames() { # <name> <sanitizers>
        "${CXX:-g++}" "${emulated[@]}" -O0 "-fsanitize=$2" -fno-sanitize-recover=all \
            tests/kernels/frames.cpp tests/kernels/driver.cpp "$folder/emulator.o" -pthread \
            -o "$folder/$1"
    }

    build_frames asan-frames address,undefined
    build_frames tsan-frames thread
    "$folder/asan-frames" 3 256
    TSAN_OPTIONS=halt_on_error=1 "${fixed_layout[@]}" "$folder/tsan-frames" 2 96
}

sanitize_extensions() { # [quick]
    local python copy=build/sanitized runtime report
    python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
    report=$(realpath "$folder")/report
    rm -rf "$copy"
    mkdir -p "$copy"
    # With their times: C that Cython has written, and what is not compiled anew, is not stale.
    {
        git ls-files --cached --others --exclude-standard
        find build/temp.* -name '*.c'
        find fastcomm/transports/{cuda,nccl} -name '*.so'
    } | tar --create --files-from=- | tar --extract --directory="$copy"
    cd "$copy"
    # Optimising takes longer than it saves here, too.
    sed 's/"-O3"/"-O0"/; s/"-g0"/"-g1"/' setup.py >setup_sanitized.py
    CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 \
        -DFASTCOMM_NO_CLONES" LDFLAGS="-fsanitize=address,undefined" \
        "$python" setup_sanitized.py --quiet build_ext --inplace --parallel 2

    local tests=(
        tests/comm/test_forms.py tests/comm/test_objects.py tests/comm/test_watchdog.py
        tests/launching/test_damaged_notes.py tests/transports/group/test_damaged_announcements.py
        tests/reducer/features/test_sparse_offers.py
        tests/transports/shm/test_damaged_announcements.py tests/contract/test_results.py
    )
    if [ "${1:-}" != quick ]; then
        tests+=(
            tests/contract tests/transports/shm tests/transports/group/test_wires.py
            tests/transports/group/test_blocks.py tests/reducer/test_backward.py
            tests/reducer/test_buckets.py tests/reducer/test_failed_steps.py
            tests/reducer/features/test_sparse.py tests/reducer/features/test_weights.py
        )
    fi
    # ASan's runtime comes first, and that of C++, whose exceptions it looks for as it starts. Leaks
    # are not looked for: Python frees little at its end. Reports go to files, as a test may expect
    # that a rank dies. What asks for more memory than there is gets none, as without ASan.
    runtime="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so.6)"
    local status=0 options="detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16"
    PYTHONPATH=$PWD LD_PRELOAD=$runtime \
        ASAN_OPTIONS="$options:log_path=$report" \
        UBSAN_OPTIONS="print_stacktrace=1:log_path=$report" \
        "$python" -m pytest --quiet --numprocesses 2 -p no:cacheprovider --timeout 300 \
        -k "not nccl and not hierarchical and not test_driver" "${tests[@]}" || status=$?
    if grep --quiet --no-messages 'ERROR: \|runtime error: ' "$report"*; then
        cat "$report"*
        status=1
    fi
    return "$status"
}

case "${1:-both}" in
core) sanitize_core ;;
extensions) sanitize_extensions "${2:-}" ;;
both)
    sanitize_core
    sanitize_extensions
    ;;
*) sed -n '3,5s/^# *//p' "$0" >&2; exit 2 ;;
esac
