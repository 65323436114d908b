#!/usr/bin/env bash
# parts.sh TARGET...: make every target, even if an earlier one has failed. At the end, print the result of each, and
# exit with 1 if one has failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
trap 'exit 130' INT

status=0 outcomes=()
for target in "$@"; do
    began=$SECONDS outcome=passed
    "${MAKE:-make}" --no-print-directory "$target" || { outcome=FAILED; status=1; }
    outcomes+=("$(printf '%-18s %s, %d s' "$target" "$outcome" $((SECONDS - began)))")
done
echo
printf '%s\n' "${outcomes[@]}"
exit "$status"
