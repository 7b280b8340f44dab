#!/usr/bin/env bash
# Runs the tests of the crates: cargo test with the arguments given. Up to ten that fail run once more, one at a time:
# one that passes then does not fail the run, but both results are printed, so that what it waits for is mended.
set -uo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT

cargo test --locked --no-fail-fast "$@" 2>&1 | tee "$log" && exit 0

# A crate that does not compile, or a process that died, is no matter of load.
if grep -qE '^error: could not compile|\(signal: [0-9]+' "$log"; then exit 1; fi
mapfile -t failed < <(sed -n 's/ - should panic \.\.\. / ... /; s/^test \(.*\) \.\.\. FAILED$/\1/p' "$log" | sort -u)
if [ ${#failed[@]} -eq 0 ] || [ ${#failed[@]} -gt 10 ]; then exit 1; fi
status=0
for name in "${failed[@]}"; do
    if cargo test --locked "$@" -- --exact "$name" --test-threads=1 >"$log" 2>&1 &&
        grep -qE '^test result: ok\. [1-9]' "$log"; then
        passed+=("$name")
    else
        status=1
    fi
    cat "$log"
done
for name in "${passed[@]:-}"; do
    [ -z "$name" ] || echo "==== FAILED UNDER LOAD, PASSED ALONE: $name ===="
done
exit $status
