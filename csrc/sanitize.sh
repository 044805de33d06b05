#!/usr/bin/env bash
# Build the C++ kernels with sanitizers and run their tests and random problems on them.
# usage: csrc/sanitize.sh address|thread PYTHON [arguments of pytest]
#
# The package that is tested is a copy in build/sanitize/<kind>/lib. Python itself is not instrumented, so that the
# sanitizer's library is loaded before it. Leaks are not looked for: an interpreter that ends leaves what it likes.
#
# DMATTN_SANITIZE_CASES: how many random problems (200).
# DMATTN_SANITIZE_SECONDS: begin nothing more after so many seconds, build included, and say what was left out.
# DMATTN_SANITIZE_OPTIONAL=1: where there is no compiler or no sanitizer, say so and end well.
# DMATTN_SANITIZE_PROBE=1: only find out whether they are there.
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
base=$PWD/build/sanitize/$kind root=$PWD compiler=${CXX:-g++} begun=$SECONDS

missing() {
  echo "THE SANITIZERS ($kind) WERE NOT RUN: $1"
  exit "$([ "${DMATTN_SANITIZE_OPTIONAL:-}" = 1 ] && echo 0 || echo 1)"
}
command -v "$compiler" >/dev/null || missing "there is no compiler $compiler"
preloaded=$("$compiler" -print-file-name=$library)
[ -e "$preloaded" ] || missing "$compiler has no $library"
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
echo 'int main() { return 0; }' >"$probe/probe.cpp"
"$compiler" -fsanitize=$sanitizers "$probe/probe.cpp" -o "$probe/probe" 2>"$probe/log" && "$probe/probe" 2>>"$probe/log" ||
  missing "$compiler -fsanitize=$sanitizers makes no program that runs ($(head -n 1 "$probe/log"))"
if [ "${DMATTN_SANITIZE_PROBE:-}" = 1 ]; then
  echo "the sanitizers ($kind) can be run"
  exit 0
fi

flags="-fsanitize=$sanitizers -fno-omit-frame-pointer"
[ "$kind" = thread ] || flags="$flags -fno-sanitize-recover=undefined"
CFLAGS="${CFLAGS:-} $flags" CXXFLAGS="${CXXFLAGS:-} $flags" LDFLAGS="${LDFLAGS:-} $flags" \
  "$python" setup.py -q build --build-base "$base" --build-lib "$base/lib"

# libstdc++ beside it: the sanitizer finds the function that throws exceptions when it is loaded, or not at all.
export LD_PRELOAD="$preloaded $("$compiler" -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0:ignore_noninstrumented_modules=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
cd "$base/lib"  # first on the path, before the checkout
"$python" -c 'import dmattn_ops, sys; from dmattn_ops.kernels import native; sys.exit(native.reason() or 0)'
"$python" -c 'import dmattn_ops, os; assert dmattn_ops.__file__.startswith(os.getcwd()), dmattn_ops.__file__'

left_out=()
begin() {  # whether there is time for a step; what comes first always runs
  local passed=$((SECONDS - begun))
  if [ "$passed" -gt "${DMATTN_SANITIZE_SECONDS:-1000000}" ]; then
    left_out+=("$1")
    return 1
  fi
  echo "sanitizers ($kind), after $passed s: $1"
}
tests=(test_native_masks.py test_native_intervals.py test_native_scores.py test_native.py)
# A thread's worth of memory errors is not what ThreadSanitizer looks for.
[ "$kind" = thread ] || tests=(test_native_untrusted.py "${tests[@]}")
if [ -z "${DMATTN_SANITIZE_SECONDS:-}" ]; then
  steps=("${tests[*]}")
else
  steps=("${tests[@]}")  # one after the other, as far as there is time
fi
for step in "${steps[@]}"; do
  [ "$step" = "${steps[0]}" ] || begin "$step" || continue
  read -ra files <<<"$step"
  "$python" -m pytest -q -c "$root/pyproject.toml" --rootdir "$root" -o pythonpath="$root/tests/support" -p no:cacheprovider \
    -k "not other_instruction_sets" "${files[@]/#/$root/tests/kernels/}" "$@"
done
if begin "${DMATTN_SANITIZE_CASES:-200} random problems"; then
  "$python" -m dmattn_ops.testing --cases "${DMATTN_SANITIZE_CASES:-200}"
fi
[ ${#left_out[@]} = 0 ] || echo "LEFT OUT FOR TIME: $(IFS=,; echo "${left_out[*]}")"
