#!/usr/bin/env bash
# parts.sh TARGET...: make every target, even if an earlier one has failed. At the end, print the result of each, and
# exit with 1 if one has failed. In continuous integration (if CI is set), print the failures of pytest once more before
# the results, because a long log is often cut in the middle.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
trap 'exit 130' INT

if [[ ${CI:-} && ! ${PARTS_LOG:-} ]]; then
    PARTS_LOG=$(mktemp) || exit
    export PARTS_LOG
    trap 'rm -f "$PARTS_LOG"' EXIT
    "$0" "$@" 2>&1 | tee "$PARTS_LOG"
    status=${PIPESTATUS[0]}
    if ((status)); then
        awk '/^=+ (FAILURES|ERRORS) =+$/ { shown = 1 } / (passed|failed|errors?).* in [0-9.]+s/ { shown = 0 } shown' "$PARTS_LOG"
        tail -n $(($# + 1)) "$PARTS_LOG"
    fi
    exit "$status"
fi

status=0 outcomes=()
for target in "$@"; do
    began=$SECONDS outcome=passed
    "${MAKE:-make}" --no-print-directory "$target" || { outcome=FAILED; status=1; }
    outcomes+=("$(printf '%-18s %s, %d s' "$target" "$outcome" $((SECONDS - began)))")
done
echo
printf '%s\n' "${outcomes[@]}"
exit "$status"
