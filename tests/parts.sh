#!/usr/bin/env bash
# parts.sh TARGET...: make every target, whatever became of those before it. At the end tell what became of each, and
# exit with 1 if one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
trap 'exit 130' INT
trap 'exit 143' TERM

status=0 report=''
for target in "$@"; do
    began=$SECONDS outcome=passed
    "${MAKE:-make}" --no-print-directory "$target" || { outcome=FAILED status=1; }
    report+=$(printf '%-18s %s, %d s' "$target" "$outcome" $((SECONDS - began)))$'\n'
done
printf '\n%s' "$report"
exit "$status"
