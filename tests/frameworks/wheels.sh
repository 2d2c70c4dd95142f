#!/usr/bin/env bash
# Builds the wheels that take minutes, once a machine: wheels.sh PYTHON prints the folder that has them.
#   horovod/       torch and TensorFlow, on MPI (Debian's Open MPI) and Gloo
#   horovod-gloo/  torch, on Gloo alone
#   deepspeed/     with its shared-memory collectives for the CPU, which it else compiles in the first job
# Prints nothing where the compilers are not there (see tests/cluster/packages.txt).
# PYTHON has torch and TensorFlow installed; the wheels fit these versions only. They are kept in DISTBOOT_WHEELS, or
# else in the user's cache folder.
set -euo pipefail
python=$(realpath -s "$1")
PATH="$(dirname "$python"):$PATH"

horovod=0.28.1
deepspeed=0.19.8
# cmake is Debian's: what pip brings, 4, refuses what Horovod asks of it.
tools=(setuptools wheel packaging cloudpickle psutil pyyaml cffi ninja)

say() { echo "distboot: $*" >&2; }

for tool in cmake g++ make mpicxx; do
    if ! command -v "$tool" >/dev/null; then
        say "no $tool: Horovod is not built, and its tests are left out"
        exit 0
    fi
done

fits=$("$python" -c '
import sys, sysconfig
from importlib.metadata import version
found = (sysconfig.get_config_var("SOABI"), "torch-" + version("torch"), "tensorflow-" + version("tensorflow_cpu"))
print("_".join(found))')
cache=${DISTBOOT_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/distboot/wheels}/$fits
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two at once would build everything twice
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

kept() { compgen -G "$cache/$1/*.whl" >/dev/null; }

keep() { # NAME FOLDER: a wheel is there whole or not at all
    mkdir "$work/keep"
    mv "$2"/*.whl "$work/keep"
    rm -rf "${cache:?}/$1"
    cp -r "$work/keep" "$cache/$1.new"
    mv "$cache/$1.new" "$cache/$1"
    rm -rf "$work/keep"
}

build() { # FOLDER SOURCE: with the log shown only if it fails
    "$python" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --no-cache-dir -w "$1" "$2" \
        >"$1.log" 2>&1 || { tail -n 60 "$1.log" >&2; exit 1; }
}

# torch 2.13 and TensorFlow 2.21 want C++17. Horovod 0.28.1 asks for 14, and its XLA file does not fit this TensorFlow.
# The tests need no fast Horovod: without optimization and debug symbols it compiles in half the time.
horovod_sources() {
    "$python" -m pip download --disable-pip-version-check --quiet --no-deps --no-build-isolation --no-binary :all: \
        -d "$work/sdist" "horovod==$horovod" >&2
    mkdir -p "$work/horovod-src"
    tar -xzf "$work/sdist/horovod-$horovod.tar.gz" -C "$work/horovod-src" --strip-components 1
    sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' "$work/horovod-src"/CMakeLists.txt \
        "$work/horovod-src"/horovod/*/CMakeLists.txt
    sed -i 's/"-O2" "-O3"/"-O2 -g" "-O0"/' "$work/horovod-src/CMakeLists.txt"
    sed -i '/xla_mpi_ops\.cc/d' "$work/horovod-src/horovod/tensorflow/CMakeLists.txt"
}

kept horovod && kept horovod-gloo && kept deepspeed ||
    "$python" -m pip install --disable-pip-version-check --quiet "${tools[@]}" >&2

if ! kept horovod; then
    say "building Horovod for torch and TensorFlow, on MPI and Gloo (5 to 10 minutes, once a machine)"
    horovod_sources
    HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        MAKEFLAGS="-j$(nproc)" build "$work/horovod" "$work/horovod-src"
    keep horovod "$work/horovod"
    rm -rf "$work/horovod-src"
fi
if ! kept horovod-gloo; then
    say "building Horovod for torch on Gloo alone (3 to 5 minutes, once a machine)"
    horovod_sources
    HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MPI=1 \
        HOROVOD_WITH_GLOO=1 MAKEFLAGS="-j$(nproc)" build "$work/horovod-gloo" "$work/horovod-src"
    keep horovod-gloo "$work/horovod-gloo"
fi
if ! kept deepspeed; then
    say "building DeepSpeed with its collectives for the CPU (2 minutes, once a machine)"
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 build "$work/deepspeed" "deepspeed==$deepspeed"
    keep deepspeed "$work/deepspeed"
fi
echo "$cache"
