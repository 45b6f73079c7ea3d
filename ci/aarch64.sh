#!/usr/bin/env bash
# The C core on aarch64, without such a machine: its driver (tests/transports/shm/driver.c), compiled
# as in the wheels and run under emulation, with ranks as processes and as threads. Takes Debian's
# gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static, and a minute on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

aarch64-linux-gnu-gcc -std=gnu11 -O3 -ffp-contract=off -Wall -Wextra -Werror -static -Ikernels \
    kernels/shm/*.c tests/transports/shm/*.c -lm -pthread -o "$folder/driver"
qemu-aarch64-static "$folder/driver" processes quick
qemu-aarch64-static "$folder/driver" threads quick
