#!/usr/bin/env bash
# The tests that need a GPU, in three parts of a few minutes each: tools/gpu_tests.sh 1|2|3 [pytest options]
#
#   1  results: both modes and both APIs against the dense reference, recordings, every kernel
#   2  graphs, streams, ranks that fail
#   3  all that is left: commands, layers, ranks that take turns, examples
#
# The parts of a shard run side by side, since most of the first run is compilation. The table at the end is meant for
# docs/gpu-runs.md; the logs are in $OUT, or in a folder of /tmp. Exits 1 if a test failed.
set -u
cd "$(dirname "$0")/.."
shard=${1:-}
case $shard in
1 | 2 | 3) shift ;;
*)
    echo "usage: tools/gpu_tests.sh 1|2|3 [pytest options]   (which third of the tests; got '$shard')" >&2
    exit 2
    ;;
esac
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && [ -z "${PYTHON:-}" ] && python=.venv/bin/python
if ! $python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "tools/gpu_tests.sh: $python finds no GPU that torch can use; anyep doctor says more" >&2
    exit 2
fi
logs=${OUT:-$(mktemp -d /tmp/anyep-gpu-tests.XXXX)}

results=(
    "tests/normal/test_oracle.py"
    "tests/normal/test_recorded.py"
    "tests/low_latency/test_oracle.py tests/low_latency/test_recorded.py"
    "tests/gpu/test_kernels.py"
    "tests/elastic"
)
failures=(
    "tests/gpu/test_normal.py"
    "tests/gpu/test_low_latency.py"
    "tests/gpu/test_elastic.py"
    "tests/faults"
)
others=(
    "tests/gpu/test_commands.py tests/gpu/test_mps.py"
    "tests/gpu/test_turns.py"
    "tests/gpu/test_making.py tests/gpu/test_routing.py tests/gpu/test_shares.py"
)
left="tests"
for paths in "${results[@]}" "${failures[@]}" "${others[@]}"; do
    for path in $paths; do left+=" --ignore=$path"; done
done

case $shard in
1) lanes=("${results[@]}") ;;
2) lanes=("${failures[@]}") ;;
3) lanes=("${others[@]}" "$left") ;;
esac

export SHRINK_EXAMPLES=0
started=$SECONDS
for lane in "${!lanes[@]}"; do
    # shellcheck disable=SC2086 -- several paths
    $python -m pytest -p no:cacheprovider -o addopts="--strict-markers -q" -o timeout=600 -m gpu \
        --durations=8 ${lanes[$lane]} "$@" >"$logs/shard-$shard-$lane.log" 2>&1 &
    pids[lane]=$!
done
# How far each part is, every half minute, until all have ended.
while sleep 30 >/dev/null 2>&1 && kill -0 "${pids[@]}" 2>/dev/null; do
    for lane in "${!lanes[@]}"; do
        echo "$((SECONDS - started)) s, part $lane: $(tail -c 80 "$logs/shard-$shard-$lane.log" | tail -1)"
    done
done &
reporter=$!
failed=0
for lane in "${!lanes[@]}"; do
    wait "${pids[$lane]}" || failed=1
done
kill "$reporter" 2>/dev/null

echo
for lane in "${!lanes[@]}"; do
    grep -E "^(FAILED|ERROR) " "$logs/shard-$shard-$lane.log"
    grep -E "^[0-9.]+s (call|setup)" "$logs/shard-$shard-$lane.log" | head -4
done
echo
echo "$(date -u +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $($python - <<'EOF'
import torch, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{gpu}, torch {torch.__version__}, Triton {triton.__version__}")
EOF
)"
echo "\`tools/gpu_tests.sh $shard\`: $((SECONDS - started)) s"
echo
echo "| tests | result |"
echo "|---|---|"
for lane in "${!lanes[@]}"; do
    name=${lanes[$lane]/#tests --ignore*/all other tests}
    echo "| \`$name\` | $(tail -1 "$logs/shard-$shard-$lane.log" | tr -d '=' | xargs) |"
done
exit $failed
