#!/usr/bin/env bash
# Build the C++ kernels with sanitizers and run their tests and random problems on them.
# usage: csrc/sanitize.sh address|thread PYTHON [arguments of pytest]
#
# The package that is tested is a copy in build/sanitize/<kind>/lib. Python itself is not instrumented, so that the
# sanitizer's library is loaded before it. Leaks are not looked for: an interpreter that ends leaves what it likes.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1 python=$(command -v "$2")
shift 2
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
case $kind in
  address) sanitizers=address,undefined library=libasan.so ;;
  thread) sanitizers=thread library=libtsan.so ;;
  *) echo "expected address or thread, got $kind" >&2; exit 2 ;;
esac
base=$PWD/build/sanitize/$kind root=$PWD compiler=${CXX:-g++}
flags="-fsanitize=$sanitizers -fno-omit-frame-pointer"
[ "$kind" = thread ] || flags="$flags -fno-sanitize-recover=undefined"
CFLAGS="${CFLAGS:-} $flags" CXXFLAGS="${CXXFLAGS:-} $flags" LDFLAGS="${LDFLAGS:-} $flags" \
  "$python" setup.py -q build --build-base "$base" --build-lib "$base/lib"

# libstdc++ beside it: the sanitizer finds the function that throws exceptions when it is loaded, or not at all.
export LD_PRELOAD="$("$compiler" -print-file-name=$library) $("$compiler" -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0:ignore_noninstrumented_modules=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
cd "$base/lib"  # first on the path, before the checkout
"$python" -c 'import dmattn_ops, sys; from dmattn_ops import native; sys.exit(native.reason() or 0)'
"$python" -c 'import dmattn_ops, os; assert dmattn_ops.__file__.startswith(os.getcwd()), dmattn_ops.__file__'
tests=(test_native.py test_native_intervals.py test_native_masks.py test_native_scores.py)
# A thread's worth of memory errors is not what ThreadSanitizer looks for.
[ "$kind" = thread ] || tests+=(test_native_untrusted.py)
"$python" -m pytest -q -c "$root/pyproject.toml" --rootdir "$root" -o pythonpath="$root/tests" -p no:cacheprovider \
  -k "not other_instruction_sets" "${tests[@]/#/$root/tests/}" "$@"
"$python" -m dmattn_ops.testing --cases "${DMATTN_SANITIZE_CASES:-200}"
