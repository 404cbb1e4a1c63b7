#!/usr/bin/env bash
# Build Horovod for the torch in .venv, keep the wheel in a cache, install it and prove that it loads.
#
#   scripts/horovod/build.sh                                 .venv of this checkout
#   PYTHON=/opt/venv/bin/python scripts/horovod/build.sh     another interpreter
#   scripts/horovod/build.sh --if-missing                    nothing where it is built already, in no time
#   WHEEL_DIR=/wheels scripts/horovod/build.sh               leave the wheel there, too
#
# The last line of a success: `horovod: ready: 0.28.1 for torch ... (gloo, mpi)`. Anything that the user must fix
# ends in one line that says how, exit status 2. README.md beside this file lists the variables.
set -euo pipefail

unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_CONSTRAINT PIP_BUILD_CONSTRAINT # as in scripts/dev/setup.sh
export PIP_USER=0

VERSION=0.28.1
SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0 # horovod-0.28.1.tar.gz on PyPI

here=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
python=${PYTHON:-$root/.venv/bin/python}
patch_file=$here/horovod-$VERSION.patch
lock_file=$root/requirements/horovod-build.txt
cache=${XDG_CACHE_HOME:-${HOME:-~}/.cache}/cluster-recipes/horovod

say() { printf 'horovod: %s\n' "$*"; }
die() {
    say "$*" >&2
    exit 2
}

# --- What is there -----------------------------------------------------------------------------------------------

# The note says for which torch, and with which patch, Horovod was installed: either may have changed since.
note=.installed-for-torch
patch_hash=$(sha256sum <"$patch_file" | cut -c1-12)
if [[ ${1:-} == --if-missing ]]; then
    "$python" - "$note" "$patch_hash" <<'PY' && exit
import importlib.metadata, importlib.util, pathlib, sys
spec = importlib.util.find_spec("horovod")
note = pathlib.Path(spec.submodule_search_locations[0], sys.argv[1]) if spec else None
wanted = [importlib.metadata.version("torch"), sys.argv[2]]
sys.exit(not (note and note.is_file() and note.read_text().split() == wanted))
PY
fi

# torch itself is not imported here: that alone would take seconds.
facts() {
    "$python" - <<'PY'
import importlib.util, os, pathlib, platform, runpy, sys, sysconfig

torch = importlib.util.find_spec("torch")
if torch is None:
    sys.exit(1)
folder = pathlib.Path(torch.submodule_search_locations[0])
version = runpy.run_path(str(folder / "version.py"))
nccl = folder.parent / "nvidia" / "nccl"
needed = {"pip": "pip", "cloudpickle": "cloudpickle", "packaging": "packaging", "psutil": "psutil", "yaml": "pyyaml"}
print(version["__version__"])
print(version.get("cuda") or "")
print("-".join([sys.implementation.cache_tag, sysconfig.get_platform(), "".join(platform.libc_ver())]))
print(nccl if (nccl / "include/nccl.h").exists() and (nccl / "lib/libnccl.so.2").exists() else "")
print(" ".join(name for module, name in needed.items() if importlib.util.find_spec(module) is None))
print(os.path.join(sysconfig.get_path("include"), "Python.h"))
PY
}

[[ -x $(command -v "$python") ]] || die "no Python at $python: make the environment first, or set PYTHON"
found=$(facts) || die "$python has no torch: install the project's requirements first, or set PYTHON"
{ read -r torch; read -r torch_cuda; read -r platform; read -r nccl_wheel; read -r missing; read -r python_h; } <<<"$found"
[[ -z $missing ]] || die "$python lacks $missing: $python -m pip install $missing (no pip at all: $python -m ensurepip)"
command -v flock >/dev/null || die "flock is missing (it keeps two builds apart): apt-get install util-linux"

# A CUDA toolkit counts when it is whole and of torch's major version; prints its folder, else fails with the reason.
cuda_toolkit() {
    local home
    for home in "${HOROVOD_CUDA_HOME:-}" "${CUDA_HOME:-}" "$(dirname "$(dirname "$(command -v nvcc)")")" /usr/local/cuda; do
        if [[ -x $home/bin/nvcc && -e $home/include/cuda_runtime.h && -e $home/lib64/libcudart_static.a ]]; then
            [[ $("$home/bin/nvcc" --version) == *"release ${torch_cuda%%.*}."* ]] && printf '%s' "$home" && return
            printf 'torch needs CUDA %s, the toolkit in %s is another' "$torch_cuda" "$home" && return 1
        fi
    done
    printf 'no whole CUDA toolkit (nvcc, cuda_runtime.h, libcudart_static.a)'
    return 1
}

# HOROVOD_GPU_OPERATIONS as the user set it wins, also when it is empty: that asks for the CPU.
user_options=$(env | LC_ALL=C grep -E '^(CXX|HOROVOD_(ALLOW|BUILD|CPU_OP|CUDA|GPU|NCCL|NVTX|WITH)[A-Z_]*)=' |
    grep -vx HOROVOD_GPU_OPERATIONS= | sort || true) # that is in the variant
cpu_because=
if [[ -n ${HOROVOD_GPU_OPERATIONS:-} ]]; then
    [[ -n $torch_cuda ]] || die "HOROVOD_GPU_OPERATIONS=$HOROVOD_GPU_OPERATIONS, but this torch is a CPU build: unset it, or install a CUDA torch"
    toolkit=$(cuda_toolkit) || die "HOROVOD_GPU_OPERATIONS=$HOROVOD_GPU_OPERATIONS: $toolkit: install CUDA ${torch_cuda%%.*}, set HOROVOD_CUDA_HOME, or unset it"
elif [[ -v HOROVOD_GPU_OPERATIONS ]]; then
    cpu_because="HOROVOD_GPU_OPERATIONS is empty"
elif [[ -z $torch_cuda ]]; then
    cpu_because="torch is a CPU build"
elif ! toolkit=$(cuda_toolkit); then
    cpu_because=$toolkit
elif [[ -z $nccl_wheel${HOROVOD_NCCL_HOME:-}${HOROVOD_NCCL_INCLUDE:-} && ! -e /usr/include/nccl.h ]]; then
    cpu_because="no nccl.h: neither torch's wheel nor libnccl-dev"
else
    export HOROVOD_GPU_OPERATIONS=NCCL
fi

if [[ -n $cpu_because ]]; then
    variant=cpu
    unset HOROVOD_GPU_OPERATIONS
    export HOROVOD_WITHOUT_NVTX=1
else
    variant=${HOROVOD_GPU_OPERATIONS,,}
    export HOROVOD_CUDA_HOME=$toolkit CUDA_HOME=$toolkit # the second is read by torch
    # The NCCL that torch itself has loaded, so that the process holds one.
    export HOROVOD_NCCL_LINK=${HOROVOD_NCCL_LINK:-SHARED}
    if [[ -n $nccl_wheel && -z ${HOROVOD_NCCL_HOME:-}${HOROVOD_NCCL_INCLUDE:-} ]]; then
        export HOROVOD_NCCL_INCLUDE=$nccl_wheel/include HOROVOD_NCCL_LIB=$nccl_wheel/lib
    fi
fi

mpi=nompi mpi_is=
if [[ ${HOROVOD_WITHOUT_MPI:-} != 1 ]] && mpi_is=$(mpicxx -show 2>/dev/null); then
    mpi=mpi
    export HOROVOD_WITH_MPI=1
elif [[ ${HOROVOD_WITH_MPI:-} == 1 ]]; then
    die "HOROVOD_WITH_MPI=1, but mpicxx is not on PATH: apt-get install libopenmpi-dev openmpi-bin, or load your MPI module"
else
    export HOROVOD_WITHOUT_MPI=1
fi
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1

# Another MPI, compiler or option, another patch or tool: another wheel.
hash=$({ cat "$patch_file" "$lock_file" && printf '%s\n' "$mpi_is" "$user_options"; } | sha256sum | cut -c1-12)
key=$VERSION-torch$torch-$platform-$variant-$mpi-$hash
what="torch $torch, ${variant^^}, $([[ $mpi == mpi ]] && echo with || echo without) MPI"
work=$cache/$key.build
log=$cache/$key.log

# --- How it is built -----------------------------------------------------------------------------------------------

child=
cleanup() {
    if [[ -n $child ]]; then
        kill -TERM -- "-$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    rm -rf "$work"
}

# watch LABEL HINT COMMAND...: the output goes to the log; one moving line on a terminal, a line each 30 s elsewhere.
watch() {
    local label=$1 hint=$2 start=$SECONDS shown=-30 line percent
    shift 2
    set -m # a process group of its own: an interrupt can end the compilers too
    "$@" </dev/null >>"$log" 2>&1 9>&- &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        percent=$(sed -nE 's/^\[([0-9]+)\/([0-9]+)\].*/\1 \2/p' "$log" | tail -n 1 | awk '{printf "[%3d%%] ", 100 * $1 / $2}')
        printf -v line '%s: %s%dm%02ds' "$label" "$percent" $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60))
        if [[ -t 1 ]]; then
            printf '\rhorovod: %s\033[K' "$line"
        elif ((SECONDS - start - shown >= 30)); then
            say "$line"
            shown=$((SECONDS - start))
        fi
        sleep 0.5
    done
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
    if wait "$child"; then
        child=
        return
    fi
    child=
    { grep -m 3 -A 4 -E 'CMake Error|FAILED:|[^a-z]error: |^ERROR|No space left' "$log" || tail -n 15 "$log"; } >&2
    die "$hint; the whole log: $log"
}

compiles() { printf '#include <concepts>\nint main() {}\n' | "$1" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }

build() {
    local cxx=${CXX:-c++}
    command -v patch >/dev/null || die "patch is missing: apt-get install patch"
    command -v "${cxx%% *}" >/dev/null || die "no C++ compiler ($cxx): apt-get install g++ (11 or newer), or set CXX"
    compiles "$cxx" || die "$cxx does not compile C++20, which torch needs: apt-get install g++ (11 or newer), or set CXX"
    [[ -e $python_h ]] || die "$python_h is missing: apt-get install python3-dev"

    rm -rf "$work"
    mkdir -p "$work/source" "$work/wheel"
    : >"$log"
    watch "fetching the build tools" "could not fetch the build tools (requirements/horovod-build.txt)" \
        "$python" -m pip install --require-hashes --only-binary :all: --no-deps --target "$work/tools" -r "$lock_file"

    # env -C and not cd in a subshell: a signal has to find this shell, which ends the compilers.
    local tools=(env -C "$work/source" "PATH=$work/tools/bin:${HOROVOD_CUDA_HOME:+$HOROVOD_CUDA_HOME/bin:}$PATH" "PYTHONPATH=$work/tools" CMAKE_GENERATOR=Ninja
        "CMAKE_BUILD_PARALLEL_LEVEL=${MAX_JOBS:-$(nproc)}"
        "CXXFLAGS=${CXXFLAGS:-} -ffile-prefix-map=$work/source/=") # Horovod's messages name their source file
    printf 'horovod==%s --hash=sha256:%s\n' "$VERSION" "$SHA256" >"$work/sdist.txt"
    watch "fetching Horovod $VERSION" "could not fetch Horovod's source, or its hash is not the known one" \
        "${tools[@]}" "$python" -m pip download --require-hashes --no-deps --no-binary horovod --no-build-isolation \
        -d "$work" -r "$work/sdist.txt"
    tar -xzf "$work/horovod-$VERSION.tar.gz" --strip-components=1 -C "$work/source"
    patch -d "$work/source" -p1 --dry-run <"$patch_file" >>"$log" 2>&1 ||
        die "$patch_file does not apply to Horovod $VERSION: restore it from the repository; what patch says: $log"
    patch -d "$work/source" -p1 <"$patch_file" >>"$log" 2>&1
    watch "building for $what" "the build failed" \
        "${tools[@]}" "$python" -c 'from setuptools.build_meta import __legacy__; __legacy__.build_wheel("../wheel")'
    [[ $("$python" -m zipfile -l "$work"/wheel/*.whl) == *$'\n'horovod/torch/mpi_lib_v2* ]] || die "the wheel lacks the library for torch; the whole log: $log"
    rm -rf "${cache:?}/$key"
    mv "$work/wheel" "$cache/$key" # a rename: the wheel is there whole or not at all
}

# --- What is done --------------------------------------------------------------------------------------------------

install_wheel() {
    "$python" -m pip install --quiet --no-deps --no-index --force-reinstall "$cache/$key"/horovod-*.whl
}

# `import horovod.torch` alone forgives a missing library: load it, too. From an empty folder, so that none shadows it.
verify() {
    (cd "$work" && "$python" -c '
import importlib.metadata, pathlib, sys
import horovod, torch, horovod.torch as hvd
parts = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, name + "_built")()]
print(f"horovod: ready: {horovod.__version__} for torch {torch.__version__} ({chr(44).join(parts)})".replace(",", ", "))
note = pathlib.Path(horovod.__path__[0], sys.argv[1])
note.write_text(" ".join([importlib.metadata.version("torch"), sys.argv[2]]) + "\n")' "$note" "$patch_hash") || return
    if [[ -n ${WHEEL_DIR:-} ]]; then mkdir -p "$WHEEL_DIR" && cp "$cache/$key"/horovod-*.whl "$WHEEL_DIR"; fi
}

main() {
    mkdir -p "$cache"
    exec 9>"$cache/$key.lock"
    flock -n 9 || { say "the same build is running elsewhere: waiting for it" && flock 9; }
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP

    [[ -z $cpu_because ]] || say "CPU operations, because: $cpu_because"
    if [[ -d $cache/$key ]]; then
        say "from the cache: $what"
        mkdir -p "$work"
        install_wheel
        verify && exit
        say "that wheel does not load here: building it again"
    fi
    build
    install_wheel
    verify
}

main
