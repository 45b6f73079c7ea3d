#!/usr/bin/env bash
# Compiles the CUDA kernels into a folder as setup.py does, where there is an nvcc: warnings and
# spilled registers are errors. Prints the highest number of registers in each family of kernels,
# and what ci/sass.py finds in the machine code, where there is a cuobjdump. Takes half a minute on
# two cores.
#
#     bash ci/kernels.sh <folder>
set -euo pipefail
folder=${1:?"usage: bash ci/kernels.sh <folder>"}
cd "$(dirname "$0")/.."

if ! command -v nvcc >/dev/null; then
    echo "no nvcc here: the CUDA kernels are not compiled"
    exit 0
fi
mkdir -p "$folder"
# Without the architectures that this nvcc does not know.
awk 'NR == FNR { known[$1] = 1; next }
    !match($0, /arch=compute_[0-9]+/) || substr($0, RSTART + 5, RLENGTH - 5) in known' \
    <(nvcc --list-gpu-arch) kernels/cuda/nvcc.options >"$folder/nvcc.options"
for source in flatten unflatten blocks; do
    log=$folder/$source.log
    nvcc --options-file "$folder/nvcc.options" -Werror all-warnings \
        -Xptxas --verbose,--warn-on-spills,--warning-as-error \
        "kernels/cuda/$source.cu" -o "$folder/$source.fatbin" >"$log" 2>&1 || {
        cat "$log"
        exit 1
    }
    awk '
        /Compiling entry function/ {
            gsub(/\047/, "")
            split($(NF - 2), name, "_")
            family = name[1] " for " $NF
            count[family]++
        }
        /bytes spill stores/ { spilled[family] += $5 }
        /Used [0-9]+ registers/ { if ($5 > most[family]) most[family] = $5 }
        END {
            for (family in count) {
                printf "%s: %d kernels, at most %d registers, %d bytes spilled\n", family,
                    count[family], most[family], spilled[family]
            }
        }' "$log" | sort
done

# What the page says of this nvcc.
page=docs/gpu.md
release=$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
used=$(grep -ho 'Used [0-9]* registers' "$folder"/{flatten,unflatten}.log | sort -n -k 2)
range="$(head -n 1 <<<"$used" | cut -d ' ' -f 2) to $(tail -n 1 <<<"$used" | cut -d ' ' -f 2,3)"
if grep -q "What nvcc $release makes of the kernels" "$page" && ! grep -q "$range" "$page"; then
    echo "$page: with nvcc $release it is $range" >&2
    exit 1
fi
python3 ci/sass.py "$folder"
