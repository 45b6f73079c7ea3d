#!/usr/bin/env bash
# A wheel of dist/ as a user gets it: one Python with one version of torch in an empty environment,
# the installed package, and no sources of it. Runs the tests of what every script relies on, the
# README's commands and two examples. A few minutes on two cores, and 6 GB for a while with a CUDA
# build of torch. Exits with 1 at the first that fails.
#
#     bash ci/smoke.sh python torch-version
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
version=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIP_CONSTRAINT=$folder/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
unset PYTHONPATH
unset PYTHONDONTWRITEBYTECODE # without bytecode each rank would compile all of torch

# These are pinned for one torch; the others bring, or limit, their own.
grep -vE '^(torch|nvidia-nccl|nvidia-cuda-nvrtc|setuptools)\b' ci/constraints.txt >"$PIP_CONSTRAINT"
tag=$("$python" -c 'import sys; print("cp{}{}".format(*sys.version_info))')
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --no-compile "torch==$version" \
    dist/fastcomm-*-"$tag"-*_"$(uname -m)".whl \
    hypothesis pytest pytest-random-order pytest-timeout pytest-xdist

mkdir "$folder/tests"
git archive HEAD bench examples kernels pyproject.toml tests | tar -x -C "$folder/tests"
cd "$folder/tests"
PATH=$folder/environment/bin:$PATH
python - <<'END'
import platform, sys, torch, fastcomm

assert fastcomm.__file__.startswith(sys.prefix), fastcomm.__file__
print("Python", platform.python_version(), "torch", torch.__version__, fastcomm.__file__)
END
# Without the stand-ins for NCCL: they are of the source tree.
python -m pytest --quiet --numprocesses 4 -p no:cacheprovider -k "not nccl" tests/contract \
    tests/optim/test_{distributed_checkpoints,sharded_state}.py \
    tests/reducer/test_{backward,training}.py tests/backend/test_{autoload,groups}.py
fastcomm info
fastcomm demo --steps 10 --layers 2 --rounds 2
fastcomm run --ranks 2 examples/accumulation.py
python -m torch.distributed.run --standalone --nproc-per-node=2 examples/diloco.py
