#!/usr/bin/env bash
# The C core under the sanitizers: ASan and UBSan with ranks as processes and as threads, TSan with
# threads. The CUDA kernels, compiled for the host, under ASan and UBSan lane by lane, and whole, in
# the block emulator, under TSan, too. About a minute on two cores.
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

build asan address,undefined
build tsan thread
"$folder/asan" processes quick
"$folder/asan" threads quick
# TSan before gcc 14 does not know every address layout, so we ask for the fixed one. A container
# may refuse; then TSan runs without it.
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
